"""FedDG-GA: raise the weights of clients that suffer most when their model is averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.models.tasks import CLASSIFICATION, LearningTask
from feddg_methods.shared.choices import choose

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "official": {"metric": "accuracy"},
    "paper": {"gap_timing": "next_participation"},
    "pardon": {
        "gap_data": "client_train",
        "gap_timing": "next_participation",
        "step": 1 / 3,
        "without_history": "zero",
        "fallback": "samples",
    },
    "fedccrl": {
        "gap_data": "client_train",
        "gap_mean": "batches",
        "step": 0.001,
        "initial_weights": "batches",
    },
}
"""Defaults of settings that each variant changes, in addition to its weight rule."""

NO_SPREAD = 1e-12
"""Clients count as equal if the largest gap is below this."""

LAST_RESORT = 1e-300
"""Share of a client of weight 0: negligible next to any weight, and effective only if all are 0."""


class FedDGGASettings(MethodSettings):
    """Variants of the gap and of the weight rule."""

    labels: ClassVar[tuple[str, ...]] = ("variant", "gap_timing")
    presets = VARIANTS
    preset_of = "variant"

    variant: Literal["default", "official", "paper", "pardon", "fedccrl"] = "default"
    """Weight rule (`adjusted_weights`); sets the defaults of the settings below, each of which can
    still be set individually."""
    metric: Literal["loss", "accuracy"] = "loss"
    """The metric whose difference is the gap: cross-entropy as in the paper, or accuracy."""
    gap_data: Literal["client_val", "client_train"] = "client_val"
    """The client's validation images; or its training batches, where the local term is the running
    mean over the last local epoch, measured during training."""
    gap_mean: Literal["images", "batches"] = "images"
    """Mean over images, or over batch means, where the last batch can be smaller."""
    gap_timing: Literal["same_round", "next_participation"] = "same_round"
    """Clients measure the new model at once, or the one received when they next take part."""
    step: float = Field(0.2, ge=0)
    """d: step size of the weights in the first round, relative to 1/N by default; decays to 0."""
    initial_weights: Literal["uniform", "batches"] = "uniform"
    """a before round 1: 1/N, or proportional to the clients' numbers of training batches."""
    without_history: Literal["keep", "zero"] = "keep"
    """With ``next_participation``, a client without a local term yet keeps its weight, or takes 0
    as its local term, so that its gap is the whole metric."""
    fallback: Literal["weights", "samples"] = "weights"
    """``samples``: image counts are the weights in the first round and in any round after a NaN
    gap, and the other gaps are then ignored. ``weights``: a client without a gap keeps its
    weight."""


class FedDGGA(Method):
    """FedDG-GA, generalisation adjustment (Zhang et al., CVPR 2023).

    The server keeps a weight a_i for every client and averages with a_i / sum of a_j over the
    participants, instead of image counts. Client i's gap G_i is the metric of the averaged model
    minus that of its local model, on its own images; a_i rises if G_i is above the mean gap. With
    ``step=0`` no gap is measured, and the default is FedAvg under ``federation.weighting=uniform``.
    """

    Settings = FedDGGASettings
    settings: FedDGGASettings
    uplink: ClassVar = {
        "fit": ("weights",),
        "measure": {"own": "float | NoneType", "averaged": "float | NoneType"},
        "count_batches": {"batches": "int"},
    }
    client_validation = True
    singles = "gives each client a weight of its own"
    tasks = ("classification", "regression")
    title = "FedDG-GA"
    citation = (
        "R. Zhang, Q. Xu, J. Yao, Y. Zhang, Q. Tian, Y. Wang: Federated Domain Generalization "
        "with Generalization Adjustment, CVPR 2023, https://openaccess.thecvf.com/content/CVPR2023/"
        "html/Zhang_Federated_Domain_Generalization_With_Generalization_Adjustment_CVPR_2023_"
        "paper.html"
    )

    def build(self) -> None:
        if self.settings.metric == "accuracy" and self.task is not CLASSIFICATION:
            raise SettingsError(
                f"feddg_ga measures gaps of accuracy, which a {self.task.name} has not: "
                f"set hyper.metric=loss"
            )
        self.seen: list[Tensor] = []

    # ----------------------------------------------------------------- aggregation weights a

    def prepare(self, server: Server) -> None:
        a = torch.ones(len(server.clients), dtype=torch.float64)
        if self.settings.initial_weights == "batches":
            replies = server.ask(self.count_batches, everyone=True, weights=False)
            counts = {reply.client: float(reply.value["batches"]) for reply in replies}
            usual = sum(counts.values()) / len(counts)  # for a client whose reply was left out
            a = torch.tensor([counts.get(name, usual) for name in server.clients]).to(a)
        server.memory["a"] = a / a.sum()
        server.memory["by_samples"] = self.settings.fallback == "samples"

    def run_round(self, server: Server) -> None:
        s = self.settings
        if s.step and s.gap_timing == "next_participation" and server.round > 1:
            self.adjust(server, finished=server.round - 1)
        super().run_round(server)
        server.memory["by_samples"] = False
        if s.step and s.gap_timing == "same_round":
            self.adjust(server, finished=server.round)

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        a = server.memory["a"] / server.memory["a"].max()  # equal weights are exactly 1
        weights = dict(zip(server.clients, a.tolist(), strict=True))

        def weighted(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            by_samples = server.memory["by_samples"]
            weight = reply.num_examples if by_samples else weights[reply.client]
            return reply.value.weights, weight

        mean = signed_mean(map(weighted, updates), self.trainable)
        return server_step(server.weights, mean, server.federation.server_lr, self.trainable)

    def adjust(self, server: Server, finished: int) -> None:
        """Ask the cohort for gaps of the model after ``finished`` rounds, and adjust a by them."""
        s = self.settings
        number = {client: i for i, client in enumerate(server.clients)}
        gaps = {}
        for reply in server.ask(self.measure):
            if reply.value:
                own, averaged = reply.value["own"], reply.value["averaged"]
                missing = own is None or averaged is None
                gaps[number[reply.client]] = math.nan if missing else averaged - own
        server.memory["by_samples"] = s.fallback == "samples" and any(
            math.isnan(value) for value in gaps.values()
        )
        if server.memory["by_samples"]:
            return
        late = RULES[s.variant].late  # counts rounds from 0, up to R itself
        server.memory["a"] = adjusted_weights(
            server.memory["a"],
            gaps,
            round=finished - late,
            rounds=max(server.federation.rounds - late, 1),
            step=s.step,
            variant=s.variant,
        )

    # --------------------------------------------------------------- gaps, at the clients

    def fit(self, client: Client) -> LocalUpdate:
        with self.temporarily(seen=[]):
            update = super().fit(client)
            if self.settings.step:
                on_training = self.settings.gap_data == "client_train"
                own = self.seen if on_training else self.measured(client)
                client.memory["own"] = self.mean(own)
        return update

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        self.seen = []
        return super().batches(client, epoch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        if self.settings.gap_data == "client_train" and not self.alone:
            self.seen.append(badness(logits.detach(), labels, self.settings.metric, self.task))
        return self.task.loss(logits, labels, "mean")

    def measure(self, client: Client) -> Payload:
        """Return the metric of the client's last local model and of the received one.

        Either is ``None`` if it is not finite; both are missing if the client has no model of its
        own yet. The local term is used once: it belongs to the model that was averaged last.
        """
        newcomers = self.settings.gap_timing, self.settings.without_history
        if newcomers == ("next_participation", "zero"):
            client.memory.setdefault("own", 0.0)
        if "own" not in client.memory:
            return {}
        averaged = self.mean(self.measured(client))
        return {"own": client.memory.pop("own"), "averaged": averaged}

    @torch.no_grad()
    def measured(self, client: Client) -> list[Tensor]:
        """Return the `badness` [B] of each of the client's batches, in evaluation mode."""
        if self.settings.gap_data == "client_val":
            batches = client.validation_batches()
        else:  # an epoch not used for training, with its own augmentation
            batches = client.batches(train=True, epoch=client.train.local_epochs)
        self.eval()
        values = []
        for images, labels in batches:
            with client.fabric.autocast():
                logits = self(images)
            values.append(badness(logits, labels, self.settings.metric, self.task))
        self.train()
        return values

    def mean(self, values: list[Tensor]) -> float | None:
        """Return the mean of the batches' values, [B] each; ``None`` if it is not finite."""
        if self.settings.gap_mean == "batches":
            values = [batch.mean(dtype=torch.float64, dim=0, keepdim=True) for batch in values]
        mean = float(torch.cat(values).mean(dtype=torch.float64))
        return mean if math.isfinite(mean) else None

    def count_batches(self, client: Client) -> Payload:
        """Return the number of the client's training batches."""
        return {"batches": math.ceil(len(client.data) / client.train.batch_size)}


def badness(
    outputs: Tensor, labels: Tensor, metric: str, task: LearningTask = CLASSIFICATION
) -> Tensor:
    """Return [B] losses or, for accuracy, errors (0 or 1): larger is worse for both."""
    if metric == "accuracy":
        return (outputs.argmax(dim=1) != labels).float()
    return task.loss(outputs.float(), labels, "none")


def adjusted_weights(
    weights: Tensor,
    gaps: Mapping[int, float],
    *,
    round: int,
    rounds: int,
    step: float,
    variant: Literal["default", "official", "paper", "pardon", "fedccrl"] = "default",
) -> Tensor:
    """Raise the weights of clients that lost most when their model was replaced by the average.

    a_i <- a_i + d (1 - r/R) (G_i - mean G) / max G, then a <- a / sum of a.

    Clients without a gap, or whose gap is NaN or infinite, count as absent. By default they keep
    their weights, and the weights of the others keep their sum; in the other variants, made for
    full participation, they have a gap of 0 after centring, and all weights are divided by their
    sum. Gaps of 0 change nothing; nor do equal gaps if their mean is subtracted.

    Source: FedDG-GA (Zhang et al., CVPR 2023). The variants are in `RULES`.

    Args:
        weights: Weights of all clients, [N], in the simplex.
        gaps: Generalisation gap of each participant by index: metric of the averaged model minus
            that of its own, positive if averaging made it worse.
        round: Round in the formula of the step, which falls with ``round / rounds``.
        rounds: Rounds in the formula of the step.
        step: Step size before the decay: 0.2 in the paper, 1/3 in PARDON, 0.001 in FedCCRL.
        variant: Rule to apply.

    Returns:
        New weights, [N].

    Raises:
        SettingsError: If ``variant`` is unknown.
    """
    rule = choose("variant", variant, RULES)
    known = [i for i, gap in gaps.items() if math.isfinite(gap)]
    if not known:
        return weights.clone()
    d = step * (1 - (round - rule.late) / rounds)
    a = weights.clone()
    a[known] += rule.move(weights.new_tensor([gaps[i] for i in known]), d, len(weights))
    a = a.clamp(*rule.limits)
    group = known if rule.absent_keep else list(range(len(weights)))
    if a[group].sum() == 0:
        return weights.clone()
    a[group] *= weights[group].sum() / a[group].sum()
    return a


def signed_mean(
    states: Iterable[tuple[Mapping[str, Tensor], float]], names: Sequence[str]
) -> Weights:
    """Return the mean of model states with weights that may be 0 or negative.

    Clients of weight 0 count only if no client has a positive one, and then equally; integer
    tensors take the maximum over all. Without negative weights this is
    `feddg_bench.core.aggregation.streaming_mean`, bit for bit. Negative weights affect trainable
    parameters only, since a running variance must not be extrapolated, and have no effect if the
    sum of the weights is not positive. Only one of the given states is in memory at a time.

    Args:
        states: K states with equal names and shapes, each with its weight; normalised here.
        names: Names of trainable parameters.

    Returns:
        A new state; no input is changed.

    Raises:
        ValueError: If there are no states.
    """
    gained = lost = 0.0
    taken: Weights = {}

    def convex(pair: tuple[Mapping[str, Tensor], float]) -> tuple[Mapping[str, Tensor], float]:
        nonlocal gained, lost
        state, weight = pair
        if weight < 0:
            lost -= weight
            for name in names:
                part = -weight * state[name]
                taken[name] = taken[name] + part if name in taken else part
        gained += max(weight, 0.0)
        return state, max(weight, LAST_RESORT)

    mean = streaming_mean(map(convex, states))
    if gained > lost:
        for name, sum_taken in taken.items():
            mean[name] = (gained * mean[name] - sum_taken) / (gained - lost)
    return mean


# ------------------------------------------------------------------------------- rules for a


def _paper(gaps: Tensor, d: float, clients: int) -> Tensor:  # noqa: ARG001
    g = gaps - gaps.mean()
    return _ratio(d * g, g.max())


def _default(gaps: Tensor, d: float, clients: int) -> Tensor:
    """Return the paper's moves, over the largest absolute gap and relative to the weight 1/N."""
    g = gaps - gaps.mean()
    return _ratio(d / clients * g, g.abs().max())


def _official(gaps: Tensor, d: float, clients: int) -> Tensor:  # noqa: ARG001
    """Return a third of raw gaps over the largest absolute one; N is 3 in the authors' script."""
    return _ratio(d / 3 * gaps, gaps.abs().max())


def _pardon(gaps: Tensor, d: float, clients: int) -> Tensor:  # noqa: ARG001
    return _ratio(d * gaps, gaps.abs().max())


def _fedccrl(gaps: Tensor, d: float, clients: int) -> Tensor:  # noqa: ARG001
    g = gaps - gaps.mean()
    return _ratio(d / 3 * g, g.max())


def _ratio(moves: Tensor, largest: Tensor) -> Tensor:
    """Return moves [K] over the largest gap; 0 if clients count as equal."""
    return torch.zeros_like(moves) if largest < NO_SPREAD else moves / largest


class Rule(NamedTuple):
    """A rule for the weights a.

    Attributes:
        move: Moves [K] of the participants, from their gaps [K], the decayed step d and N.
        limits: Smallest and largest weight before all are divided by their sum.
        late: Number of rounds by which the decay lags.
        absent_keep: Whether clients without a gap keep their weights.
    """

    move: Callable[[Tensor, float, int], Tensor]
    limits: tuple[float, float] = (0, 1)
    late: int = 0
    absent_keep: bool = False


RULES = {
    "paper": Rule(_paper, limits=(0, math.inf)),
    "default": Rule(_default, absent_keep=True),
    "official": Rule(_official, late=1),
    "pardon": Rule(_pardon),
    "fedccrl": Rule(_fedccrl, limits=(-math.inf, math.inf)),
}
"""Rules of the paper, of this module, and of the code of the authors, PARDON and FedCCRL."""


DEVIATIONS = (
    "The paper's gap is a difference of losses; the authors' script uses accuracy by default. We "
    "use the loss (`metric`).",
    "The paper subtracts the mean gap and divides by the largest; the authors' code divides raw "
    "gaps by the largest absolute value. We subtract the mean and divide by the largest absolute "
    "value (`variant`).",
    "The paper's step is d (1 - r/R); the authors' code takes a third of it, for three clients of"
    " weight 1/3. Ours too is relative to the uniform weight: d (1 - r/R) / N (`variant`).",
    "The authors' code decays one round late, from d (1 + 1/R), over R + 1 rounds. We count as "
    "the paper does; for the authors' variant R is `federation.rounds` - 1 (`variant`).",
    "The paper compares models when a client next receives one; the authors' code sends the new "
    "model to the same clients at once. So do we (`gap_timing`).",
    "The authors' code measures on a held-out part of each source domain. We measure on each "
    "client's validation images (`gap_data`).",
    "Neither says what becomes of clients that are not sampled. Ours keep their weights, and the "
    "weights of the others keep their sum (`variant`).",
    "PARDON's code takes 1/3 for the whole step, measures gaps by the running loss on augmented "
    "training images, takes 0 for the local term of a newcomer and for the gap of an absent "
    "client, and falls back to image counts in the first round and whenever a gap is NaN. We do "
    "none of this by default (`variant`).",
    "PARDON's code goes on training in evaluation mode once it has measured. We switch back.",
    "FedCCRL's code starts from numbers of batches and moves by at most a third of 0.001, which "
    "is FedAvg in effect. We do so only on request (`variant`).",
)
"""Where published code differs from its paper, and what this module does."""
