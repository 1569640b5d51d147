"""Weights files are read or refused without running any code in them."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from feddg_bench.common.errors import DataError
from feddg_bench.config.keys import file_digest
from feddg_bench.models.weights import load_tensors
from tests.helpers import refused

TENSORS = {
    "conv.weight": torch.arange(6.0).view(2, 3),
    "bn.num_batches_tracked": torch.tensor(7),
}


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_reads_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "w.safetensors")
    assert_same(load_tensors(tmp_path / "w.safetensors"))


@pytest.mark.parametrize("suffix", [".pth", ".pt"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_reads_state_dicts(tmp_path: Path, suffix: str, zipped: bool) -> None:
    path = tmp_path / f"w{suffix}"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
    assert_same(load_tensors(str(path)))


def test_reads_a_models_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    found = load_tensors(tmp_path / "w.pth")
    assert torch.equal(found["weight"], model.weight)


@pytest.mark.parametrize("writer", ["torch", "torch_legacy", "pickle"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, writer: str) -> None:
    path, folder = tmp_path / "w.pth", tmp_path / "made_by_the_pickle"
    content = {"weight": Malicious(folder)}
    if writer == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=writer == "torch")
    with refused(DataError, "run code"):
        load_tensors(path)
    assert not folder.exists()


def test_a_whole_model_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "w.pth")
    with refused(DataError, "state dict"):
        load_tensors(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "content",
    [torch.zeros(2), [torch.zeros(2)], {"state_dict": {"w": torch.zeros(2)}}, {"epoch": 3}, {1: 2}],
    ids=["tensor", "list", "checkpoint", "number", "key"],
)
def test_anything_but_named_tensors_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pth")
    with refused(DataError, "mapping from names to tensors"):
        load_tensors(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights at all", bytes(100)])
def test_damaged_files_are_one_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=name) as caught:
        load_tensors(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    tensors = {"w": torch.rand(1000)}
    if name == "w.pth":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match=name):
        load_tensors(path)


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    assert file_digest(tmp_path / "w") == hashlib.sha256(b"abc").hexdigest()
