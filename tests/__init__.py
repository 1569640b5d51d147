"""Tests of the suite; `tests.helpers` holds what several of them need."""
