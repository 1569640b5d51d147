"""Models for figures: trained in memory by the loop of every run, kept after requested rounds.

Models that a run kept on disk are reused. Figures of images are drawn by `image_grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.analysis.figures.drawing import PALE, bare, new_figure
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import file_name
from feddg_bench.common.streams import generator
from feddg_bench.common.titles import domain_title
from feddg_bench.config.schema import KEEP, Resources
from feddg_bench.core.loop import RoundResult, evaluated_model
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Task, Weights
from feddg_bench.core.method import Method
from feddg_bench.data.augment import to_float
from feddg_bench.data.client_images import ImageBank
from feddg_bench.data.federated import Federation
from feddg_bench.data.protocols import TITLES
from feddg_bench.engine.devices import open_executor
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.plugins import dataset_title
from feddg_bench.records.store import ResultsStore, open_results
from feddg_bench.runs.driver import train
from feddg_bench.runs.kept import read_model
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Plan
from feddg_bench.runs.setup import Run, RunData, open_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass
class Trained:
    """A run in memory, after the last requested round."""

    plan: Plan  # what was run
    federation: Federation  # images, clients and splits
    classes: tuple[str, ...]  # names of the classes
    method: Method  # the module, with the weights loaded last
    spec: WorkerSpec  # specification to build a worker
    private: Weights  # state of a client that never trained
    memories: dict[str, Payload] = field(default_factory=dict)
    # global models after each requested round; 0 is before round 1
    models: dict[int, Weights] = field(default_factory=dict)
    before: Weights = field(default_factory=dict)  # weights sent to the last round's clients
    updates: dict[str, Weights] = field(default_factory=dict)  # clients' trained weights
    tasks: dict[str, Task] = field(default_factory=dict)  # tasks of these clients

    def load(self, weights: Weights, client: str | None = None) -> Method:
        """Return the module in evaluation mode with the weights.

        If ``client`` is given, the module also has that client's own state.
        """
        self.method.state.load(self.private)
        if client is not None:
            self.method.state.load(self.memories.get(client, {}).get("private state", {}))
        self.method.state.load(weights)
        return self.method.eval()

    @property
    def device(self) -> torch.device:
        """Device of the module."""
        return next(self.method.parameters()).device

    def images(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return images float [B, 3, H, W] in [0, 1], and labels [B], on the module's device."""
        pixels, labels = ImageBank(self.federation, torch.device("cpu")).take(
            torch.from_numpy(np.asarray(index, dtype=np.int64))
        )
        return to_float(pixels).to(self.device), labels.to(self.device)


class _Keeper(Observer):
    """Keeps the global models of the requested rounds, and the last round's local training.

    Round 0 is before round 1.
    """

    def __init__(self, trained: Trained, at: Collection[int]) -> None:
        self.trained = trained
        self.at = at
        self.current = -1

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        if not isinstance(reply.value, LocalUpdate):
            return
        if task.round != self.current:
            self.current = task.round
            self.trained.tasks, self.trained.updates = {}, {}
            self.trained.before = _copy(task.weights)
        self.trained.tasks[reply.client] = task
        self.trained.updates[reply.client] = _copy(reply.value.weights)

    def round(self, run: Run, result: RoundResult) -> None:
        if result.round in self.at:
            self.trained.models[result.round] = _copy(evaluated_model(run.method, run.server))

    def end(self, run: Run) -> None:
        self.trained.memories = dict(run.executor.memories)


def trained_runs(
    plans: Sequence[Plan],
    resources: Resources,
    at: str | None,
    *observers: Observer,
    updates: bool = False,
) -> list[Trained]:
    """Return each run with the global models of the requested rounds.

    Models that the run kept are used; otherwise it is trained in memory up to the last requested
    round. ``updates`` also requests the clients' updates: if the model was kept, the clients of its
    round train once more, starting from it. For ``at`` see `wanted_rounds`.

    Raises:
        FeddgError: If the data, a file or a setting cannot be used.
    """
    wanted = [wanted_rounds(at, plan.settings.federation.rounds) for plan in plans]
    data = RunData(resources.cache_dir)
    executor = open_executor(resources)
    found = []
    try:
        for plan, rounds in zip(plans, wanted, strict=True):
            run = open_run(plan, data, executor, resources)
            trained = Trained(
                plan, run.federation, plan.dataset.classes, run.method, run.spec, run.private
            )
            kept = _kept_models(open_results(resources.results), plan, rounds)
            if kept and updates:
                last = kept[max(rounds)]
                run.server.weights = {
                    n: last[n].to(w.device) for n, w in run.server.weights.items()
                }
                run.server.round = max(rounds) - 1
            if not kept or updates:
                train(run, _Keeper(trained, rounds), *observers, until=max(rounds))
            trained.models |= kept
            found.append(trained)
    finally:
        executor.close()
    return found


def _kept_models(store: ResultsStore, plan: Plan, rounds: Collection[int]) -> dict[int, Weights]:
    """Return the models of all these rounds; empty if the run did not keep all of them."""
    found = {}
    for which in KEEP:
        path = store.model(plan.key, which)
        if path.exists():
            facts, weights = read_model(path)
            found[facts.round] = weights
    return {number: found[number] for number in rounds} if set(rounds) <= set(found) else {}


def wanted_rounds(text: str | None, rounds: int) -> list[int]:
    """Return the rounds of a comma-separated list; by default the last round.

    Raises:
        SettingsError: If an entry is not a number from 0 to the run's last round.

    >>> wanted_rounds("5,1,5", 50)
    [1, 5]
    """
    if text is None:
        return [rounds]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= rounds for part in parts):
        raise SettingsError(
            f"cannot use --at {text!r}: expected rounds from 0 to {rounds}, such as 1,{rounds}; "
            f"raise --rounds for later ones"
        )
    return sorted({int(part) for part in parts})


def sample(
    trained: Trained,
    count: int,
    *,
    splits: Collection[str] = ("id_test", "val", "test"),
    keep: Callable[[np.ndarray], np.ndarray] = lambda labels: np.full(len(labels), True),
) -> list[tuple[str, np.ndarray]]:
    """Return up to ``count`` images per domain that no client trained on, by the domain's stream.

    ``keep`` returns a mask of images that may be drawn, bool [n], from their labels [n].

    Returns:
        Domains with the ascending indices of their images, in the order of splits.
    """
    found = []
    seed = trained.plan.settings.seed
    for split, domain, index in trained.federation.evaluation:
        if split not in splits:
            continue
        allowed = index[keep(trained.federation.labels[index])]
        rng = generator(seed, "figures", split, domain)
        chosen = np.sort(rng.permutation(allowed)[:count])
        if len(chosen):
            found.append((f"{domain_title(domain)} ({split})", chosen))
    return found


def _copy(weights: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


T = TypeVar("T")


def title_of(run: Trained) -> str:
    """Return a title that names the experiment of a figure."""
    s = run.plan.settings
    where = (
        f"{dataset_title(s.dataset, run.plan.dataset.label)}, {TITLES.get(s.protocol, s.protocol)}"
    )
    return f"{where}, scenario {s.scenario}, recipe {run.plan.recipe}"


def figure_stem(figure: str, runs: Sequence[Trained]) -> str:
    """Return the stem of a figure's files."""
    s = runs[0].plan.settings
    methods = "-".join(run.plan.settings.method for run in runs)
    return file_name(f"{figure}-{s.dataset}-{s.protocol}-{s.scenario}-{methods}")


def pixels(images: Tensor) -> NDArray[np.float32]:
    """Return images [B, 3, H, W] as matplotlib draws them, [B, H, W, 3]."""
    found: NDArray[np.float32] = images.detach().cpu().float().permute(0, 2, 3, 1).numpy()
    return found


def shares(run: Trained, client: str) -> NDArray[np.float64]:
    """Return the share of each training domain in a client's images, [D]."""
    domains = run.federation.domains_of(client)
    counts = np.bincount(domains, minlength=len(run.federation.sources)).astype(np.float64)
    found: NDArray[np.float64] = counts / counts.sum()
    return found


def holding(run: Trained, client: str) -> str:
    """Return a client's two main domains, such as ``95 % Ink, 5 % Chalk``."""
    found = shares(run, client)
    most = np.argsort(-found, kind="stable")[:2]
    return ", ".join(
        f"{100 * found[d]:.0f} % {domain_title(run.federation.sources[d])}"
        for d in most
        if found[d]
    )


def image_grid(
    heads: Sequence[str],
    domains: Sequence[tuple[str, Sequence[T]]],
    draw: Callable[[T, Sequence[Axes]], None],
    *,
    row_height: float,
) -> Figure:
    """Return a figure with a row per domain and its images across, each with a column per head.

    ``draw`` fills the axes of one image, one per head; ``row_height`` is in inches.
    """
    many, across = max(len(images) for _, images in domains), len(heads)
    figure = new_figure(0.5 + 0.95 * across * many, 0.6 + row_height * len(domains))
    # Narrow columns between images show which columns belong together.
    widths = ([1.0] * across + [0.12]) * many
    grid = figure.subplots(len(domains), len(widths), squeeze=False, width_ratios=widths)
    for axes in grid.flat:
        bare(axes)
    for line, (domain, images) in zip(grid, domains, strict=True):
        for number, image in enumerate(images):
            start = number * (across + 1)
            draw(image, list(line[start : start + across]))
            for axes in line[start : start + across]:
                edge = axes.spines[:]  # otherwise white images would have none
                edge.set(visible=True, color=PALE, linewidth=0.4)
        line[0].set_ylabel(domain.replace(" (", "\n("), fontsize=7)
    for column, axes in enumerate(grid[0]):
        if column % (across + 1) < across:
            axes.set_title(heads[column % (across + 1)])
    return figure
