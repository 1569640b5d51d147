"""FDSE: every convolution extracts features, shared, and erases the domain's skew, personal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import RunningMean, watched
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import combine_updates
from feddg_methods.shared.stages import changed


class FDSESettings(MethodSettings):
    """Layers, loss and personalisation; the defaults are the authors' for PACS."""

    ratio: int = Field(2, ge=2)
    """G: a layer's extractor has one in G of its channels, and its eraser makes the others."""
    lam: float = Field(0.5, ge=0)
    """lambda, the weight of the distance between local and global statistics."""
    beta: float = Field(0.001, ge=0)
    """Layer l has the weight exp(beta l), normalised: 0 for equal weights."""
    tau: float = Field(0.5, gt=0)
    """Temperature of the similarity of erasers: clients keep their own near 0, and share one mean
    where it is large."""


class FDSE(Method):
    """FDSE (Wang et al., CVPR 2025, arXiv 2503.13063), Equations 2 to 9.

    Every convolution becomes a domain-agnostic feature extractor (DFE) and a domain-specific skew
    eraser (DSE), see `Decomposed`. Clients minimise their loss plus lambda sum_l w_l L_l, which
    pulls the statistics of the erasers' outputs towards the global ones (`consistency`). The
    server moves the DFEs, and all other shared parameters, along the direction on which the
    clients agree most (`consensus`), and returns to each client of the round a mean of the DSEs
    that resemble its own (`personalised`).

    Clients keep their DSE, including the running statistics of its normalisation. The paper
    measures each client's own model, as do we on the clients' test images
    (`data.client_test_fraction`). An unseen domain gets the mean of the round's DSEs, for
    which clients also send those statistics.
    """

    version = 2
    group = "personalisation"
    tasks = ("classification", "regression")
    acts_on = "maps"
    title = "FDSE"
    citation = (
        "Zheng Wang, Zihui Wang, Zheng Wang, Xiaoliang Fan, Cheng Wang: Federated Learning with "
        "Domain Shift Eraser, CVPR 2025, arXiv 2503.13063"
    )
    Settings = FDSESettings
    settings: FDSESettings
    needs: ClassVar = {"federation": {"bn": "average"}, "train": {"drop_last_if_single": True}}
    uplink: ClassVar = {"fit": ("weights", "dse")}
    downlink = ("dse",)
    singles = "compares the layers of every two clients"

    def build(self) -> None:
        if getattr(self.backbone, "head_only", False):
            raise SettingsError(
                "fdse trains the layers that replace convolutions, and backbone.trainable=head "
                "trains none of them: leave it out"
            )
        for name, layer in list(self.named_modules()):
            if isinstance(layer, nn.Conv2d) and layer.groups == 1:
                self.set_submodule(name, Decomposed(layer, self.settings.ratio))
        if not self.layers():
            raise SettingsError(
                "fdse needs a network with convolutions: choose another backbone.name"
            )
        self.local = tuple(f"{name}.dse." for name in self.layers())  # type: ignore[misc]

    def layers(self) -> dict[str, Decomposed]:
        """Return the decomposed layers by name, from input to output."""
        return {n: layer for n, layer in self.named_modules() if isinstance(layer, Decomposed)}

    # ------------------------------------------------------------------------ client half

    def fit(self, client: Client) -> LocalUpdate:
        told = client.broadcast.get("dse", {})
        self.state.load({name: phi.to(self.device) for name, phi in told.items()})
        weights = super().fit(client).weights
        return LocalUpdate(weights, {"dse": self.state.private_weights()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        if self.alone or not s.lam:
            return super().training_step(batch, batch_idx)
        layers, received = self.layers(), self.client.weights
        with erased(layers) as z:
            loss = super().training_step(batch, batch_idx)
        w = torch.softmax(s.beta * torch.arange(len(layers)), 0).tolist()
        for w_l, (name, layer) in zip(w, layers.items(), strict=True):
            mu, v = (received[f"{name}.norm.running_{part}"] for part in ("mean", "var"))
            loss = loss + s.lam * w_l * consistency(z[name], layer.norm, mu, v)
        return loss

    def personal_model(self, client: Client) -> Weights:
        return {**self.state.federated_weights(), **self.state.private_weights()}

    # ------------------------------------------------------------------------ server half

    def prepare(self, server: Server) -> None:
        if server.federation.bn != "average":
            raise SettingsError(
                f"federation.bn={server.federation.bn} does not go with fdse, whose layers have "
                f"shared and personal batch normalisation: leave it out"
            )

    def run_round(self, server: Server) -> None:
        kept = server.memory.get("dse", {})
        tell = {client: {"dse": kept[client]} for client in server.cohort if client in kept}
        server.weights = self.aggregate(server, server.ask(self.fit, tell=tell))

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        sent: dict[str, Weights] = {}
        mean = RunningMean()

        def look(reply: Reply[LocalUpdate]) -> None:
            sent[reply.client] = reply.value.extra["dse"]
            mean.add(sent[reply.client], server.share(reply))

        replies = watched(updates, look)
        new = combine_updates(
            server, replies, self.trainable, consensus, share=server.share, by_tensor=True
        )
        names = [name for name in self.state.private if self.state.tensors[name].requires_grad]
        own = personalised(sent, names, tau=self.settings.tau)
        server.memory["dse"] = {**server.memory.get("dse", {}), **own}
        server.memory["mean"] = mean.mean
        return new

    def global_model(self, server: Server) -> Weights:
        return {**server.weights, **server.memory.get("mean", {})}


class Decomposed(nn.Module):
    """A convolution in two parts (Equations 2 and 3): BN_DFE(DSE(DFE(x))).

    Args:
        conv: The convolution, with T output channels. The DFE takes over its first ceil(T / G)
            filters; a bias is left out, as normalisation would remove it.
        g: G, at least 2.
    """

    def __init__(self, conv: nn.Conv2d, g: int) -> None:
        super().__init__()
        m = -(-conv.out_channels // g)
        self.dfe = deepcopy(conv)
        self.dfe.weight, self.dfe.bias = nn.Parameter(conv.weight.detach()[:m].clone()), None
        self.dfe.out_channels = m
        self.dse = Eraser(m, conv.out_channels, g)
        self.norm = nn.BatchNorm2d(conv.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps [B, T, H', W'] of maps [B, C, H, W]."""
        normalised: Tensor = self.norm(self.dse(self.dfe(x)))
        return normalised


class Eraser(nn.Module):
    """The DSE: the first T channels of [s, U(s)], s = ReLU(BN_DSE(x)), U depthwise.

    Args:
        m: Channels of the input.
        t: T, from m to ``g m``.
        g: U has ``g`` - 1 outputs for each channel.
    """

    def __init__(self, m: int, t: int, g: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(m)
        self.erase = nn.Conv2d(m, m * (g - 1), 3, padding=1, groups=m, bias=False)
        self.channels = t

    def forward(self, x: Tensor) -> Tensor:
        """Return maps [B, T, H, W] of maps [B, m, H, W]."""
        s = self.norm(x).relu()
        return torch.cat([s, self.erase(s)], 1)[:, : self.channels]


@contextmanager
def erased(layers: Mapping[str, Decomposed]) -> Iterator[dict[str, Tensor]]:
    """Collect what the DSE of each layer returns within the block, by the layer's name."""
    found: dict[str, Tensor] = {}

    def note(name: str, z: Tensor) -> Tensor:
        found[name] = z
        return z

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(changed(layer.dse, partial(note, name)))
        yield found


def consistency(z: Tensor, norm: nn.BatchNorm2d, mu: Tensor, v: Tensor) -> Tensor:
    """Return L_l = 1/T ||muhat - mu||^2 + (1/T sum_c (vhat_c - v_c))^2 (Equation 6).

    muhat and vhat are the running statistics of ``norm``, which has just seen ``z`` (Equation 5);
    of them, the batch's part has a gradient.

    Args:
        z: Outputs of the DSE, [B, T, H, W].
        norm: BN_DFE.
        mu: Running mean as received, [T].
        v: Running variance as received, [T].
    """
    flat = z.to(torch.promote_types(z.dtype, torch.float32)).transpose(0, 1).flatten(1)  # [T, BHW]
    running = dict(norm.named_buffers())
    gamma = norm.momentum or 0.0
    mean, var = flat.mean(1), flat.var(1, correction=int(flat.shape[1] > 1))
    muhat = running["running_mean"] + gamma * (mean - mean.detach())
    vhat = running["running_var"] + gamma * (var - var.detach())
    return (muhat - mu).square().mean() + (vhat - v).mean().square()


def consensus(gram: Tensor, _shares: Tensor) -> Tensor:
    """Return coefficients of the step on which the updates agree most (Equation 8).

    The step is the updates' mean length times sum_k u_k d_k, the shortest vector of the convex hull
    of the updates' directions d_k. An update of 0 has the direction 0.

    Args:
        gram: Inner products of the updates, float64 [K, K].
        _shares: Not used: all updates count the same.

    Returns:
        [K], float64.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # imports half a second faster

    lengths = gram.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(inverse[:, None] * gram * inverse)
    directions = values.clamp(min=0).sqrt()[:, None] * vectors.T  # [K, K], columns d_k
    # u >= 0 that minimises ||sum_k u_k d_k||^2 + (1 - sum_k u_k)^2 is the answer but for its sum.
    system = torch.cat([directions, torch.ones_like(directions[:1])])
    goal = torch.zeros(len(system), dtype=system.dtype)
    goal[-1] = 1
    u = torch.from_numpy(nnls(system.numpy(), goal.numpy())[0])
    return lengths.mean() * u / u.sum() * inverse


def personalised(
    sent: Mapping[str, Weights], names: Sequence[str], *, tau: float
) -> dict[str, Weights]:
    """Return sum_j A_kj phi_j for each client k and tensor (Equation 9).

    A is the softmax over j of q_k . q_j / tau, with q_k = phi_k / ||phi_k||.

    Args:
        sent: phi, by client and tensor.
        names: The tensors.
        tau: Temperature, above 0.
    """
    found: dict[str, Weights] = {client: {} for client in sent}
    for name in names:
        phi = torch.stack([tensors[name] for tensors in sent.values()])
        flat = phi.flatten(1).cpu().double()  # some devices have no float64
        q = nn.functional.normalize(flat)
        mixed = (torch.softmax(q @ q.T / tau, 1) @ flat).to(phi).view_as(phi)
        for client, row in zip(found, mixed, strict=True):
            found[client][name] = row.clone()
    return found


DEVIATIONS = (
    "The authors' code has no ReLU in the DSE, which Equation 3 has, and begins with the distance "
    "of statistics in round 2, for which Algorithm 1 has no condition. We follow the paper.",
    "Equation 3 makes all G outputs of a channel by convolution. As in the authors' code and in "
    "GhostNet, from which the paper takes the layer, one of them is the channel itself.",
    "The authors' code compares statistics by a Kullback-Leibler divergence, of means and "
    "variances over channels, with one running value for all layers. We follow the paper: squares, "
    "of each channel, layer by layer. Variances are those of PyTorch's batch normalisation, whose "
    "running value is the unbiased one; Equation 4 has the biased one.",
    "The paper aggregates layer by layer. The authors' code does so tensor by tensor, as do we.",
    "The paper decomposes all layers of AlexNet but the classifier. We decompose every convolution "
    "that is not depthwise, in any network; a network's own normalisation follows. With pretrained "
    "weights, extractors begin as the first filters, and the other channels are learnt.",
    "The authors' code adds a bias before each batch normalisation, which removes its effect. We "
    "leave it out.",
    "The paper averages the running statistics of BN_DFE equally, and its code clips gradients at "
    "norm 10. We average them by the clients' shares, and clip nothing.",
    "For an unseen domain, the paper trains the erasers on its images without labels (Section "
    "5.4). Domain generalisation has no images of it: we take the mean of the round's erasers.",
)
"""Where published code differs from its paper, and what this module does."""
