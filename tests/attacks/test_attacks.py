"""Every attack of `tests.attacks` fails: no traceback, wrong accept, silent change or hang."""

from __future__ import annotations

import os

import pytest

from tests.attacks.groups import GROUPS, run


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends what hangs in a forked process")
@pytest.mark.parametrize("group", GROUPS)
def test_every_attack_is_held_off(group: str) -> None:
    rows, _ = run(group)
    assert [f"{row.attack}: {row.happened}" for row in rows if not row.held] == []
