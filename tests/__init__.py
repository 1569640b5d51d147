"""Tests of the suite; `tests.helpers` holds shared helpers."""
