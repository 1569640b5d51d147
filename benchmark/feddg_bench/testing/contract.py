"""The contract that every method must keep."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, wraps
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from feddg_bench.common.errors import FeddgError, SettingsError, in_a_line
from feddg_bench.config.layers import Layer, validate
from feddg_bench.config.schema import PrivacySettings
from feddg_bench.core.loop import RoundResult
from feddg_bench.core.messages import Reply, Task, Weights, content, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.engine.construction import build_run_method
from feddg_bench.engine.executors import ProcessExecutor
from feddg_bench.plugins import load_method
from feddg_bench.protection.possible import obstacles
from feddg_bench.protection.sums import HiddenReplies
from feddg_bench.testing.toy import (
    TaskRecorder,
    ToyRun,
    start_toy_run,
    toy_federation,
    toy_leaves,
    toy_regression,
)
from feddg_bench.testing.traces import process_settings, server_tensors, traces

ALL_CLIENTS: Layer = {"federation": {"per_round": None}}
CHANCES: Layer = {  # light keeps its place, so that it can be learnt; SGD has state
    "federation": {"per_round": None},
    "augment": {"flip": 0.0},
    "train": {"momentum": 0.9, "optimizer_state": "reset"},
}
SIZE = 20
"""Width of the images: the last map of `small_cnn` is 2 x 2, so spatial attention has an effect."""


@dataclass(frozen=True)
class Subject:
    """The method that is tested."""

    plugin: type[Method] | str  # the method's class or its registered name
    layer: Mapping[str, Any] = field(default_factory=dict)  # such as {"hyper": {...}}

    def run(self, *layers: Mapping[str, Any], **parts: Any) -> ToyRun:
        """Start a toy run of the method."""
        parts.setdefault("federation", toy_federation(SIZE))
        return start_toy_run(self.plugin, self.layer, *layers, **parts)

    @cached_property
    def some(self) -> Recorded:
        """Three rounds of two clients each, computed when a check first needs them."""
        return Recorded(self)

    @cached_property
    def everyone(self) -> Recorded:
        """Three rounds of all clients."""
        return Recorded(self, CHANCES)


class Recorded:
    """Three rounds that several checks share.

    Attributes:
        run: The run, after its rounds.
        recorder: Its executor.
        results: Result of each round, ``prepare`` first.
        states: The server's state, encoded, before the first round and after each.
        moved: Parameters and buffers that were replaced or moved in memory by the rounds.
        behind: Changes that clients left and that others can see.
        written: Tensors of the server that its half changed in place.
        process: Settings of the process before the method was built.
    """

    def __init__(self, subject: Subject, *layers: Layer) -> None:
        self.recorder = TaskRecorder()
        start_toy_run(Method)  # makes the suite's own settings
        self.process = process_settings()
        self.run = run = subject.run(*layers, executor=self.recorder)
        self.results: list[RoundResult] = []
        self.states = [encode(run.server.state())]
        self.written: set[str] = set()
        before, found = self._places(), traces(self.recorder.worker)
        try:
            for upto in (1, 2, 3):
                held = [(name, each, each._version) for name, each in server_tensors(run.server)]
                self.results += run.rounds(upto)
                self.written |= {name for name, each, was in held if each._version != was}
                self.states.append(encode(run.server.state()))
        except Exception as error:
            if behind := _changed(found, traces(self.recorder.worker)):
                error.add_note(f"clients had changed {', '.join(behind)}")
            raise
        self.behind = _changed(found, traces(self.recorder.worker))
        self.moved = [n for n, place in self._places().items() if place != before.get(n)]

    def weights(self, after: int) -> Weights:
        """Return the global model after so many rounds."""
        weights: Weights = decode(self.states[after])["weights"]
        return weights

    def _places(self) -> dict[str, tuple[int, int]]:
        state = self.run.method.state_dict(keep_vars=True)
        return {n: (id(tensor), tensor.data_ptr()) for n, tensor in state.items()}


_KEPT = (
    "a value may be kept in an attribute (client.memory and server.memory are for such), or drawn "
    "without client.generator or torch_generator"
)
"""Likely reason why the same work gives different numbers."""

Check = Callable[[Subject], None]

CONTRACT: list[Check] = []
"""All checks; parametrize a test with them to see them one by one."""


class Checked(NamedTuple):
    """The result of one check of the contract."""

    name: str
    rule: str  # the first line of its docstring
    fault: str  # why it failed, or ""
    seconds: float


def check_contract(
    method: type[Method] | str, hyper: Mapping[str, Any] | None = None
) -> Iterator[Checked]:
    """Check a method on toy data, and yield each result as soon as it is known.

    Args:
        method: The plugin's class or its registered name. For the check with two processes its
            module must be importable.
        hyper: Own settings of the method; those of ``Settings.toy`` apply unless they are given.
    """
    plugin = load_method(method) if isinstance(method, str) else method
    subject = Subject(method, {"hyper": {**plugin.Settings.toy, **(hyper or {})}})
    for check in CONTRACT:
        began, fault = time.perf_counter(), ""
        try:
            check(subject)
        except Exception as error:
            fault = "; ".join([_said(error), *getattr(error, "__notes__", ())])
        rule = (check.__doc__ or "").partition("\n")[0]
        yield Checked(check.__name__, rule, fault, time.perf_counter() - began)


def contract_tests(method: type[Method], hyper: Mapping[str, Any] | None = None) -> None:
    """Check that a method keeps the contract, as `check_contract`; takes some minutes.

    A line on standard error reports each check; ``pytest --capture=no`` shows it.

    Raises:
        AssertionError: Naming every check that failed and why.
    """
    failed = []
    for number, (name, rule, fault, seconds) in enumerate(check_contract(method, hyper), 1):
        result = "failed" if fault else "passed"
        of = f"{number} of {len(CONTRACT)}"
        sys.stderr.write(f"{method.__name__}, {of}: {name} {result} in {seconds:.1f} s\n")
        if fault:
            failed.append(f"- {name}: {fault}\n  The rule: {rule}")
    if failed:
        raise AssertionError(f"{method.__name__} breaks the contract:\n" + "\n".join(failed))


def _said(error: Exception) -> str:
    """Return why a check failed; an error of the method with its type and place."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    kind = f"{type(error).__name__}: " if isinstance(error, FeddgError) else ""
    return kind + in_a_line(error)


def _checked(check: Check) -> Check:
    CONTRACT.append(check)
    return check


def _checked_if_trained(check: Check) -> Check:
    """Check only methods that declare to send something from ``fit``: others train nothing."""

    @wraps(check)
    def only(subject: Subject) -> None:
        plugin = subject.plugin
        if "fit" in (load_method(plugin) if isinstance(plugin, str) else plugin).uplink:
            check(subject)

    return _checked(only)


@_checked_if_trained
def federated_weights_train(subject: Subject) -> None:
    """A tensor that is sent but never learns is a bug, such as a generator that was detached."""
    some = subject.some
    before, after = some.weights(0), some.weights(3)
    names_stay = set(after) == set(before) == set(some.run.method.federated)
    _require(names_stay, "the server's weights are not the federated tensors any more")
    infinite = [n for n in after if not bool(after[n].isfinite().all())]
    _require(not infinite, f"NaN or infinity in {infinite}")
    # Opposite first steps of Adam on two clients cancel out: one unchanged mean proves nothing.
    means = [recorded.weights(n) for recorded in (some, subject.everyone) for n in (1, 2, 3)]
    still = [n for n in after if all(torch.equal(mean[n], before[n]) for mean in means)]
    _require(not still, f"in three rounds unchanged: {_reasons(subject, still) if still else ''}")


@_checked
def local_prefixes_match(subject: Subject) -> None:
    """A prefix in ``local`` that names no tensor is misspelt; the intended state would be sent."""
    method = subject.some.run.method
    absent = [p for p in method.local if not any(n.startswith(p) for n in method.state_dict())]
    _require(not absent, f"no tensor begins with {absent}, which local names")


@_checked_if_trained
def loss_falls(subject: Subject) -> None:
    """The loss on in-domain images falls within three rounds."""
    evaluations = [r.evaluation for r in subject.everyone.results if r.evaluation]
    first, last = (e["id_val"]["dark"]["loss"] for e in (evaluations[0], evaluations[-1]))
    _require(
        last < first,
        f"the loss went from {first:.4f} to {last:.4f}: look for a sign, a detached tensor or a "
        f"step that is too long",
    )


@_checked_if_trained
def any_cohort_size_works(subject: Subject) -> None:
    """One, some or all clients take part; the server refuses content that is not declared."""
    recorders = {n: TaskRecorder() for n in (1, 3)}
    rounds = [
        (recorder, result)
        for n, recorder in recorders.items()
        for result in subject.run({"federation": {"per_round": n}}, executor=recorder).rounds(2)[1:]
    ]
    rounds += [(subject.everyone.recorder, result) for result in subject.everyone.results[1:]]
    for recorder, result in rounds:
        asked = {t.client for t in recorder.tasks if (t.round, t.call) == (result.round, "fit")}
        _require(asked == set(result.cohort), f"asked {asked}, not {set(result.cohort)}")
        _require(not result.ledger.dropped, f"dropped {result.ledger.dropped}")


@_checked
def processes_agree(subject: Subject) -> None:
    """Model, memories and metrics are equal bit for bit: messages survive their encoding."""
    here, in_processes = subject.some, subject.run(executor=_pool())
    same = _numbers(here.results) == _numbers(in_processes.rounds(3))
    _require(same, f"rounds differ: {_KEPT}")
    _same(in_processes.server.weights, here.run.server.weights)
    _require(encode(in_processes.server.state()) == here.states[3], "memories differ")


@_checked
def tasks_are_independent(subject: Subject) -> None:
    """Another worker that repeats the tasks of two rounds in reverse order gives equal replies."""
    again = TaskRecorder()
    subject.run(executor=again)
    recorder = subject.some.recorder
    done = [
        pair for pair in zip(recorder.tasks, recorder.replies, strict=True) if pair[0].round < 3
    ]
    for task, first in reversed(done):
        second = again.worker.run(task)
        for a, b in ((content(first.value), content(second.value)), (first.memory, second.memory)):
            _require(encode(a) == encode(b), f"{first.client} answers otherwise: {_KEPT}")
        _require(first.metrics == second.metrics, f"{first.client} logs otherwise: {_KEPT}")


@_checked
def no_side_effects(subject: Subject) -> None:
    """No part of a method changes folder, threads, layers, classes or images for others."""
    run, behind = subject.some.run, subject.some.behind
    _require(not behind, f"clients change and do not put back: {', '.join(behind)}")
    build_run_method(run.settings, run.federation, type(run.method))  # a worker set some again
    behind = _changed(subject.some.process, process_settings())
    _require(not behind, f"build changes and does not put back: {', '.join(behind)}")


@_checked
def resume_is_exact(subject: Subject) -> None:
    """All that the server and clients remember is in their memories."""
    whole = subject.some
    for stop in (1, 2):
        resumed = subject.run()
        resumed.server.restore(decode(whole.states[stop]))
        numbers = _numbers(resumed.rounds(3))
        expected = _numbers(whole.results[stop + 1 :])
        _require(numbers == expected, f"stopped after {stop}: rounds differ: {_KEPT}")
        same = encode(resumed.server.state()) == whole.states[3]
        _require(same, f"stopped after {stop}: another state")


@_checked
def declared_sums_suffice(subject: Subject) -> None:
    """The server half does the same with one mean of all replies as with single replies."""
    uniform = {"federation": {"per_round": None, "weighting": "uniform"}}
    single, hidden = subject.run(uniform), subject.run(uniform)
    if obstacles(type(single.method))["secure"]:
        return
    hidden.server.protection = HiddenReplies(PrivacySettings(), hidden.method, 1)
    for run in (single, hidden):
        run.rounds(1)
    for name, tensor in single.server.weights.items():
        if tensor.is_floating_point():
            close = torch.allclose(tensor, hidden.server.weights[name], rtol=1e-4, atol=1e-5)
            _require(
                close,
                f"{name} is another where the server half gets one mean of all: say why in singles",
            )


@_checked_if_trained
def diverged_clients_are_dropped(subject: Subject) -> None:
    """NaN in one reply only drops that client from the round."""

    def spoil(task: Task, reply: Reply[Any]) -> None:
        if (task.client, task.call, task.round) == ("client_1", "fit", 1):
            for tensor in toy_leaves(content(reply.value)).values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    run = subject.run(ALL_CLIENTS)
    run.executor.on_reply = spoil
    dropped = [{entry["client"] for entry in r.ledger.dropped} for r in run.rounds(2)[1:]]
    _require(dropped == [{"client_1"}, set()], f"dropped {dropped}")
    bad = [n for n, tensor in run.server.weights.items() if not bool(tensor.isfinite().all())]
    _require(not bad, f"NaN or infinity in {bad}")


@_checked
def messages_are_read_only(subject: Subject) -> None:
    """A client does not change the content that it received, nor the server half what it sent."""
    changed, written = subject.some.recorder.changed, sorted(subject.some.written)
    _require(not changed, f"clients changed what they got: {sorted(changed)}")
    _require(
        not written,
        f"the server half changed in place: {', '.join(written)}; assign a new tensor, as clients "
        f"may still have to read the old one, and a skipped round keeps it",
    )


@_checked
def parameters_stay_in_place(subject: Subject) -> None:
    """Weights are written in place; no parameter is replaced."""
    moved = subject.some.moved
    _require(not moved, f"replaced: {moved}")


@_checked
def settings_survive_yaml(subject: Subject) -> None:
    """Settings stay the same when written to a record or a sweep file and read again."""
    settings = subject.run().method.settings
    text = yaml.safe_dump(settings.model_dump(mode="json"))
    again = validate(type(settings), yaml.safe_load(text))
    _require(again == settings, "settings differ after YAML")


@_checked_if_trained
def seed_determines_run(subject: Subject) -> None:
    """The same seed repeats the run; another seed gives another run."""
    ends = subject.everyone.recorder.ends
    fixed = [name for name in ends[0] if len({end[name] for end in ends}) < len(ends)]
    _require(
        not fixed,
        f"some tasks leave {' and '.join(fixed)} global generator in one state: the method seeds "
        f"it, so clients and rounds draw equal numbers, whatever the seed of the run",
    )
    first, second, other = subject.some, subject.run(), subject.run({"seed": 1})
    numbers = _numbers(first.results[:3])
    same = numbers == _numbers(second.rounds(2))
    _require(same, f"the same seed gave other rounds: {_KEPT}")
    same = first.states[2] == encode(second.server.state())
    _require(same, f"the same seed gave another state: {_KEPT}")
    _require(numbers[:2] != _numbers(other.rounds(1)), "another seed gave the same round")


@_checked_if_trained
def optimizer_state_persists(subject: Subject) -> None:
    """``train.optimizer_state=persist`` acts from a client's second round on, and only then."""
    kept, reset = subject.run(CHANCES, {"train": {"optimizer_state": "persist"}}), subject.everyone
    kept.rounds(1)
    _same(kept.server.weights, reset.weights(1))
    kept.rounds(2)
    after = kept.server.weights, reset.weights(2)
    _require(any(not torch.equal(after[0][n], after[1][n]) for n in after[0]), "no difference")
    memories = (kept.executor.memories.values(), reset.recorder.memories.values())
    _require(all("optimizer" in memory for memory in memories[0]), "a client did not keep it")
    _require(not any("optimizer" in memory for memory in memories[1]), "a client kept it")


@_checked
def regression_works_or_is_refused(subject: Subject) -> None:
    """Methods whose ``tasks`` name it learn it, equally in two processes; others refuse it."""
    plugin = load_method(subject.plugin) if isinstance(subject.plugin, str) else subject.plugin
    able = "regression" in plugin.tasks
    try:
        here = subject.run(federation=toy_regression(SIZE))
    except SettingsError as error:
        refuses = not able and "regression" in str(error)
        _require(refuses, f"it should not refuse, or say why: {error}")
        return
    _require(able, "it was not refused")
    in_processes = subject.run(federation=toy_regression(SIZE), executor=_pool())
    results = here.rounds(1)
    _require(_numbers(results) == _numbers(in_processes.rounds(1)), "rounds differ in processes")
    _same(in_processes.server.weights, here.server.weights)
    for split, parts in (results[-1].evaluation or {}).items():
        for part, metrics in parts.items():
            wrong = {"pearson", "worst_group"} - set(metrics)
            _require(not wrong, f"{split} {part} has no {wrong}")
            _require(0 < metrics["loss"] < 10, f"{split} {part} has the loss {metrics['loss']}")


# ----------------------------------------------------------------------------------- helpers


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts in which two snapshots differ."""
    return sorted(n for n in {*before, *after} if before.get(n) != after.get(n))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _reasons(subject: Subject, still: list[str]) -> str:
    """Return the likely reason why each of the given federated tensors does not change."""
    recorder = TaskRecorder()
    run = subject.run(ALL_CLIENTS, executor=recorder)
    largest: dict[str, float] = {}
    parameters = dict(recorder.worker.method.named_parameters())

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            largest[name] = max(largest.get(name, 0.0), float(parameter.grad.abs().max()))

    for name in still:
        if name in parameters and parameters[name].requires_grad:
            parameters[name].register_post_accumulate_grad_hook(partial(note, name))
    run.rounds(2)
    trained: set[str] = set()
    for task, reply in zip(recorder.tasks, recorder.replies, strict=True):
        sent = content(reply.value).get("weights", {})
        trained |= {
            n for n in still if n in sent and not torch.equal(sent[n], task.weights.get(n, sent[n]))
        }
    reasons: dict[str, list[str]] = {}
    for name in still:
        if name in trained:
            why = "clients change it, but the server half keeps the old value: see aggregate"
        elif name not in parameters:
            why = "a buffer that no code writes: register it with persistent=False"
        elif not parameters[name].requires_grad:
            why = "it takes no gradients (requires_grad is False): name it in frozen"
        elif name not in largest:
            why = "no gradient reaches it: the loss does not use it, or uses it detached"
        elif largest[name] == 0:
            why = (
                "its gradient is 0: the loss does not depend on its value, as behind a softmax "
                "over one value, a ReLU that is always 0, or a factor that starts at 0"
            )
        else:
            why = f"its gradient is too small (at most {largest[name]:.1g})"
        reasons.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())


def _same(actual: Weights, expected: Weights) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _numbers(results: list[RoundResult]) -> list[Any]:
    """Return the parts of the rounds' results that must repeat exactly."""
    return [
        (r.round, r.cohort, r.skipped, r.evaluation, r.ledger.bytes, r.ledger.means())
        for r in results
    ]


@cache
def _pool() -> ProcessExecutor:
    """Return one executor with two processes for all checks: starting it takes long."""
    executor = ProcessExecutor(2)
    atexit.register(executor.close)
    return executor
