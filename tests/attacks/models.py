"""Forged kept models and tuning ledgers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from tests.attacks.lab import Lab, call
from tests.attacks.pictures import few


def attack(lab: Lab) -> None:
    """Load kept models and tuned settings from forged files."""
    kept(lab)
    ledgers(lab)


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


def ledgers(lab: Lab) -> None:
    """A ledger is used only for its own setup, and only with possible accuracies and seeds."""
    from feddg_bench.records.tuning import Trial, TuningLedger, load_ledger

    trial = Trial(settings={"train.lr": 0.5}, keys=("ab",), id_val=0.5, seconds=1.0)
    honest = TuningLedger(
        method="fedavg",
        dataset="digits4",
        protocol="ltdo",
        recipe="quick",
        scenario="ip-o-c",
        seeds=(100,),
        given=(),
        metric="accuracy",
        trials=(trial,),
        chosen=0,
    )
    frame = ("digits4", "ltdo", "quick", "fedavg")
    values = json.loads(honest.model_dump_json())

    def attempt(name: str, text: str, *, fine: bool = False) -> None:
        root = lab.folder()
        path = honest.save(root)
        Path(path).write_text(text)
        found, failed = call(load_ledger, root, *frame)
        held = failed.startswith("refused") or (fine and found is not None)
        lab.add(f"ledger: {name}", failed or "used", held)

    def with_trial(**changes: Any) -> dict[str, Any]:
        return {"trials": [values["trials"][0] | changes]}

    attempt("untouched", json.dumps(values), fine=True)
    for changes in (
        {"dataset": "pacs"},
        {"protocol": "lodo"},
        {"recipe": "converged"},
        {"method": "moon"},
        {"seeds": []},
        {"chosen": 5},
        {"metric": 5},
        {"trials": []},
        with_trial(id_val=55),
        with_trial(id_val=-1),
        with_trial(seconds=-1),
        with_trial(keys=["../x"]),
        with_trial(settings={"train.lr": [1]}),
        with_trial(settings={"__class__": 1}),
    ):
        attempt(f"{changes}", json.dumps(values | changes))
    text = json.dumps(values)
    attempt("id_val of 1e999", text.replace('"id_val": 0.5', '"id_val": 1e999'))
    attempt("id_val of NaN", text.replace('"id_val": 0.5', '"id_val": NaN'))
    attempt("a key twice", text.replace('"chosen": 0', '"chosen": 1, "chosen": 0'))
    attempt("cut short", text[:50])
