"""Where data and caches lie on this machine; never part of what a run computes."""

from __future__ import annotations

import os
from pathlib import Path

from feddg_bench.errors import SettingsError
from feddg_bench.settings import load_layer


def data_roots(explicit: Path | None = None) -> list[Path]:
    """Return the folders to look for data sets in, the first one first.

    They are the one given, ``$FEDDG_DATA``, and ``data_root:`` in the user's settings file, which
    is ``$FEDDG_CONFIG`` or ``~/.config/feddg-bench/settings.yaml``. A relative ``data_root``
    starts from the folder of that file.

    Raises:
        SettingsError: If the settings file is not YAML, its ``data_root`` is not text, or
            ``$FEDDG_CONFIG`` names no file.
    """
    roots = [] if explicit is None else [explicit.expanduser()]
    if from_environment := os.environ.get("FEDDG_DATA"):
        roots.append(Path(from_environment).expanduser())
    named = os.environ.get("FEDDG_CONFIG")
    path = Path(named or "~/.config/feddg-bench/settings.yaml").expanduser()
    if named or path.exists():
        from_file = load_layer(path).get("data_root")
        if isinstance(from_file, str):
            roots.append(path.parent / Path(from_file).expanduser())
        elif from_file is not None:
            raise SettingsError(f"data_root in {path} must be a folder's name, not {from_file!r}")
    return list(dict.fromkeys(roots))


def cache_dir(explicit: Path | None = None) -> Path:
    """Return the folder for decoded images and downloads.

    The one given, else ``$FEDDG_CACHE``, else ``~/.cache/feddg-bench``.
    """
    chosen = explicit or Path(os.environ.get("FEDDG_CACHE") or "~/.cache/feddg-bench")
    return chosen.expanduser()
