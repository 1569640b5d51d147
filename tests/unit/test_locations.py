"""Search locations of data and caches."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import cache_dir
from feddg_bench.data.locations import data_home, data_roots, remember_root
from tests.helpers import refused


@pytest.fixture(autouse=True)
def clean_home(tmp_path, monkeypatch):
    """Give each test its own home folder, without FEDDG variables."""
    for name in ("FEDDG_DATA", "FEDDG_CONFIG", "FEDDG_CACHE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def write_settings(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("function", [cache_dir, data_roots, data_home])
def test_without_a_home_what_to_do_is_told(monkeypatch, function):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as for a user id without a name
    with refused(SettingsError, "set HOME", "--cache-dir", "FEDDG_CONFIG"):
        function()


def test_there_may_be_no_root():
    assert data_roots() == []


def test_new_data_go_where_all_are_looked_for_else_to_the_users_own_folder(tmp_path, monkeypatch):
    assert data_home() == tmp_path / ".local/share/feddg-bench"
    monkeypatch.setenv("XDG_DATA_HOME", "/shared")
    assert data_home() == Path("/shared/feddg-bench")
    text = "data_roots:\n  pacs: /only/pacs\n"
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", text)
    assert data_home() == Path("/shared/feddg-bench")
    text += "data_root: /all\n"
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", text)
    assert data_home() == Path("/all")
    monkeypatch.setenv("FEDDG_DATA", "/mine")
    assert data_home() == Path("/mine")


def test_roots_come_in_order(tmp_path, monkeypatch):
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", "data_root: /from/file\n")
    assert data_roots() == [Path("/from/file")]
    monkeypatch.setenv("FEDDG_DATA", "/from/environment")
    assert data_roots() == [Path("/from/environment"), Path("/from/file")]
    assert data_roots(Path("/given")) == [Path("/given")]


def test_a_root_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDG_DATA", "/data")
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", "data_root: /data\n")
    assert data_roots() == [Path("/data")]


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDG_DATA", "~/a")
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", "data_root: ~/b\n")
    assert data_roots() == [tmp_path / "a", tmp_path / "b"]


def test_another_settings_file_replaces_the_users(tmp_path, monkeypatch):
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", "data_root: /users\n")
    other = write_settings(tmp_path / "project/mine.yaml", "data_root: images\nresults: there\n")
    monkeypatch.setenv("FEDDG_CONFIG", str(other))
    assert data_roots() == [tmp_path / "project/images"]


def test_a_settings_file_may_name_no_root(tmp_path):
    write_settings(tmp_path / ".config/feddg-bench/settings.yaml", "results: there\n")
    assert data_roots() == []


@pytest.mark.parametrize("text", ["data_root: 3\n", "data_root: [a]\n", "data_root: [a\n", "- a\n"])
def test_a_wrong_settings_file_is_named(tmp_path, text):
    path = write_settings(tmp_path / ".config/feddg-bench/settings.yaml", text)
    with pytest.raises(SettingsError, match=str(path)):
        data_roots()


def test_a_missing_named_settings_file_is_an_error(monkeypatch):
    monkeypatch.setenv("FEDDG_CONFIG", "/absent/settings.yaml")
    with refused(SettingsError, "/absent/settings.yaml"):
        data_roots()


def test_cache_directory(tmp_path, monkeypatch):
    assert cache_dir() == tmp_path / ".cache/feddg-bench"
    monkeypatch.setenv("FEDDG_CACHE", "~/scratch")
    assert cache_dir() == tmp_path / "scratch"
    assert cache_dir(Path("/given")) == Path("/given")


# ------------------------------------------------------------------- roots of single data sets


def test_a_data_sets_own_root_comes_before_those_of_all(tmp_path, monkeypatch):
    write_settings(
        tmp_path / ".config/feddg-bench/settings.yaml",
        "data_root: /all\ndata_roots:\n  pacs: /pacs\n",
    )
    assert data_roots(dataset="pacs") == [Path("/pacs"), Path("/all")]
    assert data_roots(dataset="digits4") == data_roots() == [Path("/all")]
    monkeypatch.setenv("FEDDG_DATA", "/mine")
    assert data_roots(dataset="pacs") == [Path("/pacs"), Path("/mine"), Path("/all")]
    assert data_roots(dataset="digits4") == [Path("/mine"), Path("/all")]


@pytest.mark.parametrize("text", ["data_roots: here\n", "data_roots: {pacs: 3}\n"])
def test_wrong_roots_are_named(tmp_path, text):
    path = write_settings(tmp_path / ".config/feddg-bench/settings.yaml", text)
    with pytest.raises(SettingsError, match=str(path)):
        data_roots(dataset="pacs")


@pytest.mark.parametrize(
    ("before", "dataset", "after"),
    [
        (None, None, "data_root: {0}\n"),
        (None, "pacs", "data_roots:\n  pacs: {0}\n"),
        ("# mine\nresults: there", None, "# mine\nresults: there\ndata_root: {0}\n"),
        (
            "data_root: /old # a disk\n# next\nresults: there\n",
            None,
            "data_root: {0} # a disk\n# next\nresults: there\n",
        ),
        (
            "data_roots:\n  pacs: /old\n\n# next\nresults: there\n",
            "rmnist",
            "data_roots:\n  pacs: /old\n  rmnist: {0}\n\n# next\nresults: there\n",
        ),
        ("data_roots: {{pacs: /old}}\n", "pacs", "data_roots:\n  pacs: {0}\n"),
        ("data_root:\nresults: there\n", None, "data_root: {0}\nresults: there\n"),
    ],
)
def test_a_root_is_remembered_and_the_rest_stays(tmp_path, before, dataset, after):
    path = tmp_path / ".config/feddg-bench/settings.yaml"
    if before is not None:
        write_settings(path, before.format())
    images = tmp_path / "images"
    images.mkdir()
    assert remember_root(images, dataset) == path
    assert path.read_text() == after.format(images)
    assert images in data_roots(dataset=dataset)
    assert remember_root(images, dataset) == path
    assert path.read_text() == after.format(images)


def test_a_named_settings_file_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDG_CONFIG", str(tmp_path / "mine.yaml"))
    assert remember_root(tmp_path) == tmp_path / "mine.yaml"
    assert data_roots() == [tmp_path]


def test_what_is_no_folder_is_not_remembered(tmp_path):
    with refused(SettingsError, "is no folder"):
        remember_root(tmp_path / "absent")
    assert not (tmp_path / ".config").exists()


@pytest.mark.parametrize("text", ["{data_root: /old, results: there}\n", "- a\n", "data_root: [\n"])
def test_a_file_that_cannot_be_changed_stays(tmp_path, text):
    path = write_settings(tmp_path / ".config/feddg-bench/settings.yaml", text)
    with pytest.raises(SettingsError, match=str(path)):
        remember_root(tmp_path, "pacs" if text.startswith("{") else None)
    assert path.read_text() == text
