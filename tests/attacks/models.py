"""Kept models of strangers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from tests.attacks.lab import Lab, call
from tests.attacks.pictures import few


def attack(lab: Lab) -> None:
    """Load kept models from changed and absurd files."""
    kept(lab)


def kept(lab: Lab) -> None:
    """A changed or absurd kept model is refused, even with a matching digest."""
    from feddg_bench.runs import kept as module

    out = lab.folder()
    lab.feddg("run", *few(lab), "--rounds", 2, "--results", out, "--keep", "last")
    (path,) = (out / "runs").glob("*.last.safetensors")
    good = path.read_bytes()
    with safe_open(path, "pt") as file:
        said = file.metadata()["model"]
        weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]

    def attempt(name: str, data: bytes, *, fine: bool = False, as_key: str = "") -> None:
        target = path.with_name(f"{as_key or path.name.partition('.')[0]}.last.safetensors")
        target.write_bytes(data)
        _, failed = call(module.load_model, str(target))
        held = failed.startswith("refused") or (fine and not failed)
        lab.add(f"model: {name}", failed or "loaded", held)
        path.write_bytes(good)

    def signed(tensors: dict[str, Any], **facts: Any) -> bytes:
        """Return a forgery with a matching digest, if the suite writes digests."""
        model = json.dumps(json.loads(said) | facts)
        digest: Callable[..., str] | None = getattr(module, "digest", None)
        return save(
            tensors, {"model": model, **({"digest": digest(model, tensors)} if digest else {})}
        )

    attempt("untouched", good, fine=True)
    attempt("kept by an earlier version", save(weights, {"model": said}), fine=True)
    for at in range(len(good) - 1, len(good) // 2, -max(1, len(good) // 16)):
        attempt(f"a bit of byte {at} flipped", good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    attempt("its round changed", good.replace(b'round\\":2', b'round\\":1'))
    attempt("cut short", good[: len(good) // 2])
    attempt("empty", b"")
    attempt("a pickle", b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    attempt("under another run's name", good, as_key="0" * 16)
    for value in (float("nan"), float("inf")):
        for name in (floats[0], floats[-1]):
            attempt(f"{value} in {name}", signed(weights | {name: weights[name] * value}))
    attempt("weights of NaN", signed({n: t * float("nan") for n, t in weights.items()}))
    attempt("no weights", signed({}))
    attempt("a weight more", signed(weights | {"evil": torch.zeros(2)}))
    attempt("a weight less", signed({n: weights[n] for n in floats[1:]}))
    attempt("a weight of another type", signed(weights | {floats[0]: weights[floats[0]].double()}))
    for facts in (
        {"key": "0" * 16},
        {"key": "../../evil"},
        {"round": 1},
        {"round": 1000},
        {"round": -1},
        {"num_classes": 10**9},
        {"num_classes": 0},
        {"num_classes": 10**30},
        {"channels": 10**9},
        {"channels": 0},
        {"task": "evil"},
        {"rgb": 5},
        {"clients": "evil"},
        {"settings": {}},
        {"settings": {"method": "../evil", "dataset": "digits4"}},
    ):
        attempt(f"{facts}", signed(weights, **facts))
