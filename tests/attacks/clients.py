"""Clients that raise arbitrary exceptions, or leave side effects for the next client."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from feddg_bench import plugins
from feddg_bench.common.errors import FeddgError, printable
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.messages import LocalUpdate, encode
from feddg_bench.core.method import Method
from feddg_bench.engine.executors import Executor, ProcessExecutor, SerialExecutor
from feddg_bench.testing import start_toy_run
from tests.attacks.lab import TINY, HangError, Lab, Outcome, in_time
from tests.helpers import ALL, PLAIN

CULPRIT, ROUND = "client_1", 1
COMMAND = (*TINY[:2], "--clients", 2, "--per-round", 2, "--rounds", 1, *TINY[8:])
EVIL = "FEDDG_EVIL"
_CROSS_ENTROPY = F.cross_entropy


class UnreadableError(Exception):
    """Reading its text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


class LeavingError(UnreadableError):
    """Reading its text raises `SystemExit`."""

    def __str__(self) -> str:
        raise SystemExit(0)


class StoppingError(UnreadableError):
    """Reading its text raises `KeyboardInterrupt`."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class OddError(BaseException):
    """Not an `Exception`."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": SystemExit,
    "SystemExit(0)": lambda: SystemExit(0),
    "SystemExit('done')": lambda: SystemExit("done"),
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "BaseException": lambda: BaseException("odd"),
    "a BaseException of its own": lambda: OddError("odd"),
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "an exception without a text": UnreadableError,
    "an exception whose text ends the program": LeavingError,
    "an exception whose text is an interrupt": StoppingError,
    "half a character": lambda: ValueError("\ud800"),
    "an escape": lambda: ValueError("\x1b[31mred\nand more"),
    "a FeddgError with an escape": lambda: FeddgError("\x1b[31mred"),
    "a group of exceptions": lambda: BaseExceptionGroup("two", [OddError(), ValueError()]),
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
}


class Hiding(torch.Tensor):
    """Holds NaN but appears finite."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [
            torch.zeros_like(a.as_subclass(torch.Tensor)) if type(a) is cls else a for a in args
        ]
        with torch._C.DisableTorchFunctionSubclass():
            if "norm" in getattr(func, "__name__", ""):
                lists = [[torch.zeros(()) for _ in a] if isinstance(a, list) else a for a in plain]
                return func(*lists, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


class Changing(dict[str, Any]):
    """Gives other values when read a second time."""

    def items(self):
        found = [*super().items()]
        for name in self:
            self[name] = torch.full_like(self[name], math.nan)
        return found


def nan(update: LocalUpdate, kind: type) -> LocalUpdate:
    """Return an update whose first weight is a NaN tensor of the given class."""
    name, first = next(iter(update.weights.items()))
    hidden = torch.full_like(first, math.nan).as_subclass(kind)
    return LocalUpdate({**update.weights, name: hidden}, update.extra)


def with_extra(make: Callable[[], Any]) -> Callable[[Any, Any, LocalUpdate], LocalUpdate]:
    """Return a deed: send an additional value with the weights."""
    return lambda _m, _c, update: LocalUpdate(update.weights, {"extra": make()})


def threaded(_method: Any, _client: Any, update: LocalUpdate) -> LocalUpdate:
    """Keep writing into the sent tensors for a while."""
    begin = threading.Event()

    def write() -> None:
        end = time.monotonic() + 0.3
        begin.wait(0.05)
        while time.monotonic() < end:
            for tensor in update.weights.values():
                tensor.fill_(5.0)

    threading.Thread(target=write, daemon=True).start()
    return update


Deed = Callable[[Any, Any, LocalUpdate], Any]

SENT: dict[str, Deed] = {
    "NaN in a tensor of its own kind": lambda _m, _c, u: nan(u, Hiding),
    "half a character": with_extra(lambda: "\ud800"),
    "half a character as a key": with_extra(lambda: {"\ud800": 1.0}),
    "complex128": with_extra(lambda: torch.zeros(2, dtype=torch.complex128)),
    "a quantized tensor": with_extra(
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    ),
    "a nested tensor": with_extra(
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    ),
}
"""These must be reported, with the client's name."""

LEFT: dict[str, Deed] = {
    "nothing": lambda _m, _c, _u: None,
    "weights that change when they are read": lambda _m, _c, u: LocalUpdate(Changing(u.weights)),
    "its tensors themselves in what it sends": lambda m, _c, u: LocalUpdate(
        {
            n: t.data.copy_(u.weights[n]) if n == "classifier.bias" else t.detach()
            for n, t in m.state.tensors.items()
            if n in u.weights
        }
    ),
    "another folder": lambda _m, _c, _u: os.chdir(os.sep),
    "a variable": lambda _m, _c, _u: os.environ.update({EVIL: "1"}),
    "a missing variable": lambda _m, _c, _u: os.environ.pop("PATH"),
    "two threads of PyTorch": lambda _m, _c, _u: torch.set_num_threads(2),
    "gradients off": lambda _m, _c, _u: torch.set_grad_enabled(False),
    "another default type": lambda _m, _c, _u: torch.set_default_dtype(torch.float64),
    "frozen layers": lambda m, _c, _u: m.backbone.requires_grad_(False),
    "a frozen weight": lambda m, _c, _u: m.classifier.weight.requires_grad_(False),
    "a forward hook": lambda m, _c, _u: m.classifier.register_forward_hook(lambda *a: a[2] * 2),
    "a backward hook": lambda m, _c, _u: m.classifier.register_full_backward_hook(
        lambda _m, g, _o: tuple(None if x is None else x * 2 for x in g)
    ),
    "a hook at a weight": lambda m, _c, _u: m.classifier.weight.register_hook(lambda g: g * 2),
    "a hook after a gradient": lambda m, _c, _u: (
        m.classifier.weight.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", p.grad * 2)
        )
    ),
    "a hook at the optimizer": lambda m, _c, _u: optimizer(m).register_step_pre_hook(
        lambda o, *_: o.param_groups[0].update(weight_decay=0.5)
    ),
    "other groups of the optimizer": lambda m, _c, _u: (
        optimizer(m).param_groups[0].update(weight_decay=0.5)
    ),
    "one more group of the optimizer": lambda m, _c, _u: optimizer(m).add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.5}
    ),
    "a group without its weights": lambda m, _c, _u: optimizer(m).param_groups[0]["params"].pop(),
    "gradients": lambda m, _c, _u: [p.grad.fill_(9.0) for p in m.parameters()],
    "evaluation mode": lambda m, _c, _u: m.eval(),
    "evaluation mode of a layer": lambda m, _c, _u: m.backbone.eval(),
    "another forward": lambda m, _c, _u: setattr(m.classifier, "forward", lambda x: x[:, :3] * 0),
    "another layer": lambda m, _c, _u: setattr(m, "classifier", torch.nn.Linear(m.num_features, 3)),
    "another weight": lambda m, _c, _u: setattr(
        m.classifier, "weight", torch.nn.Parameter(torch.zeros(3, m.num_features))
    ),
    "no layer": lambda m, _c, _u: delattr(m, "classifier"),
    "another step of the class": lambda _m, _c, _u: setattr(
        Hostile, "training_step", lambda m, *_: m.classifier.bias.sum()
    ),
    "another cross_entropy": lambda _m, _c, _u: setattr(
        F, "cross_entropy", lambda *a, **k: _CROSS_ENTROPY(*a, **k) * 2
    ),
    "no cross_entropy": lambda _m, _c, _u: delattr(F, "cross_entropy"),
    "another rate in client.train": lambda _m, c, _u: vars(c.train).update(lr=9.0),
    "another rate in the module": lambda m, _c, _u: vars(m.train_settings).update(lr=9.0),
    "other settings of the method": lambda m, _c, _u: vars(m.settings).update(deed="nothing"),
    "other images": lambda _m, c, _u: setattr(bank(c), "images", bank(c).images * 0),
    "other labels": lambda _m, c, _u: setattr(bank(c), "labels", bank(c).labels * 0),
    "zeros in its batches": lambda _m, c, _u: zeros(c, torch.Tensor.zero_),
    "zeros in the data of its batches": lambda _m, c, _u: zeros(c, lambda t: t.data.zero_()),
    "zeros in the arrays of its batches": lambda _m, c, _u: zeros(c, lambda t: t.numpy().fill(0)),
    "zeros in domain_ids": lambda _m, c, _u: c.domain_ids.zero_(),
    "zeros in what it got": lambda _m, c, _u: [t.zero_() for t in c.weights.values()],
    "draws": lambda _m, _c, _u: torch.rand(5),
    "a thread that writes into what was sent": threaded,
}
"""These must change nothing for other clients."""

WRITTEN: dict[str, Deed] = {
    "the images": lambda _m, c, _u: bank(c).images.zero_(),
    "an image": lambda _m, c, _u: bank(c).images[3].zero_(),
    "the labels": lambda _m, c, _u: bank(c).labels.zero_(),
    "the array of the images": lambda _m, c, _u: c.data.bank.images.numpy().fill(0),
    "its index": lambda _m, c, _u: c.data.index.data.zero_(),
    "its way to batches": lambda _m, c, _u: setattr(c.data, "batches", lambda **_: iter(())),
    "a frozen weight": lambda m, _c, _u: m.constant.zero_(),
    "the data of a frozen weight": lambda m, _c, _u: m.constant.data.zero_(),
    "the array of a frozen weight": lambda m, _c, _u: m.constant.numpy().fill(math.nan),
}
"""These must be refused, since there is no copy to restore."""

METRICS: dict[str, Deed] = {
    "a number": lambda _m, c, _u: c.log(5, 1.0),
    "half a character": lambda _m, c, _u: c.log("\ud800", 1.0),
}
MEMORY: dict[str, Deed] = {
    "half a character": lambda _m, c, _u: c.memory.update(text="\ud800"),
    "an object": lambda _m, c, _u: c.memory.update(thing=object()),
}
REFUSED = {
    **{f"sends {name}": deed for name, deed in SENT.items()},
    **{f"writes into {name}": deed for name, deed in WRITTEN.items()},
    **{f"logs under {name}": deed for name, deed in METRICS.items()},
    **{f"remembers {name}": deed for name, deed in MEMORY.items()},
}
HARMLESS = {f"leaves {name}": deed for name, deed in LEFT.items()}


def bank(client: Any) -> Any:
    """Return the images that all clients share; no attribute leads to them."""
    return client.data._batches.__closure__[0].cell_contents.bank


def zeros(client: Any, write: Callable[[torch.Tensor], object]) -> None:
    """Write into batches of every kind."""
    for train, augment, views in ((False, False, 1), (True, True, 1), (True, None, 2)):
        for batch in client.batches(train=train, augment=augment, views=views):
            deque(map(write, batch), maxlen=0)


def optimizer(method: Any) -> torch.optim.Optimizer:
    """Return the optimizer that all clients of a worker share."""
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    mine = {id(p) for p in method.parameters()}
    return next(o for o in found if any(id(p) in mine for g in o.param_groups for p in g["params"]))


class HostileSettings(MethodSettings):
    """The culprit's deed."""

    deed: str = "leaves nothing"


class Hostile(Method):
    """One client does a deed in the first round; all report what they observe in their process."""

    Settings = HostileSettings
    settings: HostileSettings
    frozen: ClassVar[tuple[str, ...]] = ("constant",)
    uplink: ClassVar[Any] = {"fit": {"weights": "model", "extra": ""}}

    def build(self) -> None:
        self.register_buffer("constant", torch.ones(2))

    def fit(self, client: Any) -> LocalUpdate:
        # A client's observations enter its weights, and thus the global model.
        seen = 1e-6 * (self.seen_by(client) % 1000)
        update = super().fit(client)
        update.weights["classifier.bias"] += seen
        update = LocalUpdate(update.weights, {"extra": 0.0})
        if (int(client.name.rpartition("_")[2]), client.round) != (1, ROUND):
            return update
        kind, _, name = self.settings.deed.partition(" ")
        if kind == "raises":
            raise RAISED[name]()
        if kind == "evaluates":
            return update
        deed = {**REFUSED, **HARMLESS}[self.settings.deed]
        found = deed(self, client, update)
        return found if isinstance(found, LocalUpdate) else update

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kind, _, name = self.settings.deed.partition(" ")
        if kind == "evaluates" and not self.training:
            raise RAISED[name]()
        return super().forward(images)

    def seen_by(self, client: Any) -> int:
        """Return a number that encodes what a client observes in its process and module."""
        hooks = [len(v) for m in self.modules() for k, v in vars(m).items() if k.endswith("hooks")]
        seen = (
            os.getcwd() == os.sep,  # noqa: PTH109
            EVIL in os.environ,
            "PATH" in os.environ,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            [p.requires_grad for p in self.parameters()],
            hooks,
            [m.training for m in self.modules()],
            hasattr(self, "seen"),
            F.cross_entropy is _CROSS_ENTROPY,
            (client.train.lr, self.train_settings.lr),
            len(client.data),
            int(bank(client).images.sum()),
            int(bank(client).labels.sum()),
            client.domain_ids.tolist(),
            float(self.constant.sum()),
        )
        return zlib.crc32(repr(seen).encode())


@contextmanager
def process_put_back() -> Any:
    """Undo in this process what the suite should have undone."""
    folder, variables = os.getcwd(), dict(os.environ)  # noqa: PTH109
    step = vars(Hostile).get("training_step")
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        F.cross_entropy = _CROSS_ENTROPY
        if step is None and "training_step" in vars(Hostile):
            del Hostile.training_step


def outcome(deed: str, executor: Executor | None = None) -> tuple[str, bytes]:
    """Return the end of a run of two rounds, and its model."""
    said = ""
    try:
        with in_time(60.0), process_put_back():
            run = start_toy_run(Hostile, ALL, PLAIN, {"hyper": {"deed": deed}}, executor=executor)
            results = run.rounds(2)
            dropped = [f"dropped {d['client']}; " for r in results for d in r.ledger.dropped]
            said = "".join(dropped) + "".join(f"skipped {r.round}; " for r in results if r.skipped)
            return said, encode(run.server.weights)
    except FeddgError as error:
        return f"refused: {error}", b""
    except HangError:
        return "hang", b""
    except BaseException as error:
        return f"traceback: {type(error).__name__}", b""


def attack(lab: Lab) -> None:
    """Try every deed in one process and in two processes, and some through the command."""
    in_processes(lab, "one process", SerialExecutor)
    in_processes(lab, "two processes", lambda: ProcessExecutor(2))
    with installed(lab.folder()):
        for where in ("fit", "evaluation"):
            for name in RAISED if lab.full else FEW:
                ends = [by_command(lab, where, name, workers) for workers in (1, 2)]
                held = ends[0] == ends[1] and all(end.refused for end in ends)
                lab.add(f"command: {where} raises {name}", ends[0].sentence, held)
                if ends[0] != ends[1]:
                    lab.add("command: with two workers", ends[1].sentence, held=False)


def in_processes(lab: Lab, where: str, start: Callable[[], Executor]) -> None:
    """Try every deed on one kind of executor, with a new executor after each that was broken."""
    executor = start()
    _, clean = outcome("leaves nothing", executor)
    for deed in (*(f"raises {name}" for name in RAISED), *REFUSED, *HARMLESS):
        said, state = outcome(deed, executor)
        if deed in HARMLESS:
            held = state == clean and not said
            said = said or ("no change" if held else "a silent change of the model")
        else:
            told = said.startswith("refused") and CULPRIT in said and f"round {ROUND}" in said
            held = (told or said.startswith(f"dropped {CULPRIT}")) and said == printable(said)
        lab.add(f"{where}: {deed}", printable(said), held)
        if not held:
            executor.close()
            executor = start()
    executor.close()


FEW = ("SystemExit(0)", "GeneratorExit", "KeyboardInterrupt", "an exception without a text")
"""Exceptions that are tried through the command in each test run."""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Register `Hostile` with the command and its processes like any installed method."""
    facts = folder / "hostile-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1\n")
    entry = f"[feddg_bench.methods]\nhostile = {__name__}:Hostile\n"
    (facts / "entry_points.txt").write_text(entry)
    found = plugins._found
    sys.path.insert(0, str(folder))
    found.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        found.cache_clear()


def by_command(lab: Lab, where: str, name: str, workers: int) -> Outcome:
    """Run the command with a method that raises an exception; return only its error."""
    deed = f"hyper.deed={'raises' if where == 'fit' else 'evaluates'} {name}"
    folder = lab.folder()
    options = ("--method", "hostile", "--workers", workers, "--results", folder, deed)
    done = lab.feddg("run", *COMMAND, *options)
    told = [line for line in done.err.splitlines() if "error: " in line or "Traceback" in line]
    records = len([*folder.glob("runs/*.json")])
    return Outcome(done.code if not records else 0, "", "\n".join(told))
