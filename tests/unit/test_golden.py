"""Shipped records keep their keys, and public names stay."""

from __future__ import annotations

from tests.golden.keys import gone, key_of, records


def test_each_shipped_record_is_planned_with_its_key() -> None:
    found = {record["key"]: key_of(record) for _, record in records()}
    assert len(found) > 2_000
    assert {old: new for old, new in found.items() if old != new} == {}


def test_no_public_name_is_gone() -> None:
    assert gone() == []
