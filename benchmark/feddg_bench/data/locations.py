"""Locations of data and caches on this machine; they never affect what a run computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import absolute, expanded, write_whole
from feddg_bench.config.layers import Layer, load_layer
from feddg_bench.config.reading import read_yaml


def settings_file() -> Path:
    """Return the user's settings file, ``$FEDDG_CONFIG`` or in ``~/.config``; it need not exist."""
    return expanded(Path(os.environ.get("FEDDG_CONFIG") or "~/.config/feddg-bench/settings.yaml"))


def check_root(explicit: Path | None) -> None:
    """Check a data folder given by the user.

    Raises:
        SettingsError: If it does not exist, or cannot be read.
    """
    try:
        exists = explicit is None or expanded(explicit).is_dir()
    except OSError as error:
        raise SettingsError(f"cannot read {explicit}: {error.strerror}") from error
    if not exists:
        raise SettingsError(f"there is no folder {explicit}: give another --data-root")


def data_roots(explicit: Path | None = None, dataset: str | None = None) -> list[Path]:
    """Return the folders in which to look for data sets, in order.

    ``explicit``, if given, is the only one. Otherwise: the data set's entry under ``data_roots:``
    in the user's `settings_file`; ``$FEDDG_DATA``; and that file's ``data_root:`` for all data
    sets. Relative paths in the file start from its folder.

    Raises:
        SettingsError: If the settings file is not YAML, a root in it is not text, or
            ``$FEDDG_CONFIG`` names no file.
    """
    if explicit is not None:  # a given folder excludes all others
        return [expanded(explicit)]
    path = settings_file()
    layer = load_layer(path) if os.environ.get("FEDDG_CONFIG") or path.exists() else {}
    named = {f"data_roots.{dataset}": _own_roots(layer, path).get(dataset)}  # most specific
    named["$FEDDG_DATA"] = os.environ.get("FEDDG_DATA") or None
    named["data_root"] = layer.get("data_root")
    roots = []
    for key, folder in named.items():
        if isinstance(folder, str):
            beside = path.parent if key != "$FEDDG_DATA" else Path()
            roots.append(beside / expanded(Path(folder)))
        elif folder is not None:
            raise SettingsError(f"{key} in {path} must be a folder's name, not {folder!r}")
    return list(dict.fromkeys(roots))


def _own_roots(layer: Layer, path: Path) -> dict[Any, Any]:
    """Return the folders that a settings file names for single data sets."""
    own = layer.get("data_roots") or {}
    if not isinstance(own, dict):
        raise SettingsError(f"data_roots in {path} must hold DATA SET: FOLDER lines, not {own!r}")
    return own


def remember_root(folder: Path, dataset: str | None = None) -> Path:
    """Write the folder of one or all data sets to the settings file, and return that file.

    The rest of the file stays unchanged, including comments.

    Raises:
        SettingsError: If ``folder`` is not a folder, or the file cannot be read as settings or
            changed.
        DataError: If the file cannot be written.
    """
    folder = absolute(folder)
    if not folder.is_dir():
        raise SettingsError(f"{folder} is no folder: name the one that holds the data set")
    path = settings_file()
    layer = load_layer(path) if path.exists() else {}
    key: str = "data_root"
    value: Any = str(folder)
    if dataset is not None:
        key, value = "data_roots", {**_own_roots(layer, path), dataset: str(folder)}
    entry = yaml.safe_dump({key: value}, allow_unicode=True, width=10_000)
    text = _with_entry(path.read_text(encoding="utf-8") if layer else "", key, entry)
    if not _holds(text, {**layer, key: value}):
        raise SettingsError(
            f"cannot change {path} without spoiling it: write {entry.strip()!r} there yourself"
        )
    write_whole(path, text.encode())
    return path


def _holds(text: str, layer: Layer) -> bool:
    try:
        return bool(read_yaml(text, "it") == layer)
    except SettingsError:
        return False


def _with_entry(text: str, key: str, entry: str) -> str:
    """Return YAML text in which the entry of a top-level key is replaced or added."""
    document = yaml.compose(text)
    for name, value in document.value if isinstance(document, yaml.MappingNode) else ():
        if name.value == key:
            last = value
            while isinstance(last, yaml.MappingNode) and not last.flow_style and last.value:
                last = last.value[-1][1]  # a block ends only where the next entry begins
            if last.end_mark.index > name.start_mark.index:
                rest = text[last.end_mark.index :]
                return text[: name.start_mark.index] + entry.rstrip("\n") + rest
    gap = "" if not text or text.endswith("\n") else "\n"
    return text + gap + entry


def data_home() -> Path:
    """Return the folder for new data sets, each in a sub-folder.

    It is the first of the `data_roots` of all data sets, else ``feddg-bench`` in
    ``$XDG_DATA_HOME`` or ``~/.local/share``.
    """
    shared = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
    return next(iter(data_roots()), None) or expanded(shared / "feddg-bench")


NETWORKS = "weights"
"""Sub-folder of a data folder that holds style networks."""
NETWORK_FILES = {"vgg19": "vgg19_adain.safetensors", "vgg19_16x": "vgg19_16x_adain.safetensors"}
"""Style network -> its file in that folder."""


def find_network(name: str, root: Path | None = None) -> Path | None:
    """Return the file of a style network; ``None`` if there is none.

    The data folder given by the user, if any, and `data_home`, the download folder, are searched.
    """
    file = NETWORK_FILES.get(name)
    if file is None:
        return None
    folders = [*([] if root is None else [expanded(root)]), data_home()]
    paths = (folder / NETWORKS / file for folder in folders)
    return next((absolute(path) for path in paths if path.is_file()), None)
