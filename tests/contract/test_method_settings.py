"""Variants and presets of every method: defaults of settings, each of which can be overridden."""

from __future__ import annotations

from typing import get_args

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.plugins import load_method, names

READINGS = [
    (name, key, reading)
    for name in names("method")
    for key in ("variant", "preset")
    if (field := load_method(name).Settings.model_fields.get(key))
    for reading in get_args(field.annotation)
]
every_reading = pytest.mark.parametrize(("name", "key", "reading"), READINGS)


@every_reading
def test_resolved_settings_resolve_to_themselves(name, key, reading):
    model = load_method(name).Settings
    settings = validate(model, {key: reading})
    assert getattr(settings, key) == reading
    assert validate(model, settings.model_dump(mode="json")) == settings


@every_reading
def test_what_is_given_beats_the_reading(name, key, reading):
    model = load_method(name).Settings
    default, settings = validate(model, {}), validate(model, {key: reading})
    changed = [n for n in model.model_fields if getattr(settings, n) != getattr(default, n)]
    back = {n: getattr(default, n) for n in changed if n != key}
    assert validate(model, {key: reading, **back}) == default.model_copy(update={key: reading})


@pytest.mark.parametrize(("name", "key"), sorted({(name, key) for name, key, _ in READINGS}))
def test_an_unknown_reading_is_refused(name, key):
    for wrong in ("papers", ["paper"], 3):
        with pytest.raises(SettingsError, match=rf"hyper\.{key}"):
            validate(load_method(name).Settings, {key: wrong}, "hyper.")
