"""Shared fixture of the data-set tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_other_roots(monkeypatch, tmp_path):
    """Let only the test set data roots."""
    monkeypatch.delenv("FEDDG_DATA", raising=False)
    monkeypatch.delenv("FEDDG_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
