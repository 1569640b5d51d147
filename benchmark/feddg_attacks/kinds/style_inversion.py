"""Style inversion: a generator, trained on public images, reconstructs the image of a style.

For PARDON's Table IV and FISC's Table 9, a generator learns on public images to draw an image from
its style. It is then applied to the styles that clients send: of single images (sample level) or of
all images of a client (client level). Our generator is small: a linear layer to 4 x 4 maps, then
nearest-neighbour upsampling and 3 x 3 convolutions up to the image's side, trained with the mean
squared error. The epoch with the best PSNR on a fifth of the public images is kept.

Two other results are also measured. A generator of the same kind draws images from their own
reductions to 8 x 8 pixels: this is the papers' baseline, and also the planted leak. And the first
generator draws images from styles of single images, whether clients send these or not.

The papers report FID and Inception Scores, which measure how good pictures are, not whose they are.
We report PSNR, SSIM, the rank of the true image among others of its domain, and how often it is
retrieved among the nearest tenth of these. With the networks' weights we also report LPIPS, FID,
KID and the Inception Score, and train another generator on LPIPS, as FISC does with one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_attacks.attack import (
    Attack,
    Pictures,
    Scene,
    interval,
    no_leak,
    planted_leak,
)
from feddg_attacks.capture import Message, by_item
from feddg_attacks.judges import Perceptual, Seen, judged
from feddg_attacks.kinds.gradient_inversion import measures_of, nearest, psnr, rank
from feddg_attacks.kinds.membership import MOST_OTHERS, MOST_PLANTED, few_clients
from feddg_attacks.pictures import sheet
from feddg_attacks.records import PERCEPTUAL, AttackResult, Interval
from feddg_attacks.shadow import Rows, Shadow
from feddg_bench.common.parallel import in_threads
from feddg_bench.common.streams import torch_generator, torch_stream
from feddg_bench.core.messages import leaves, nbytes
from feddg_bench.data.augment import to_float

MOST_PUBLIC = 1000
"""Images on which the generator is trained and validated."""
BATCH, RATE, WIDTH = 32, 2e-3, 64
FOUND = 0.7
"""Rank that a planted leak must reach."""
TOP = 0.1
"""Share of the candidates that a retrieval returns; it is also the rate of hits by chance."""
THUMBNAIL = 8
"""Side in pixels to which images are reduced for the baseline."""
SHARE = 0.1
"""Weight of LPIPS relative to the mean squared error; FISC states none. LPIPS alone loses colours,
so that not even a planted leak is found."""


class Painter(nn.Module):
    """The attacker's half: maps vectors [n, P] to images [n, C, H, W] in [0, 1].

    Args:
        vectors: Vectors of public images, [m, P]; all vectors are standardised like these.
        channels: C.
        side: H and W.
    """

    def __init__(self, vectors: Tensor, channels: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.mean, self.std = vectors.mean(0), vectors.std(0).clamp(min=1e-8)
        self.start = nn.Linear(vectors.shape[1], WIDTH * 16)
        layers: list[nn.Module] = []
        width, at = WIDTH, 4
        while at < side:
            narrow = max(16, width // 2)
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(width, narrow, 3, padding=1)]
            layers += [nn.GroupNorm(4, narrow), nn.LeakyReLU(0.2)]
            width, at = narrow, 2 * at
        self.grow = nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the images generated from vectors."""
        standard = ((vectors - self.mean) / self.std).clamp(-10, 10).float()
        maps: Tensor = self.grow(self.start(standard).view(-1, WIDTH, 4, 4))
        images = maps.sigmoid()
        if images.shape[-1] == self.side:
            return images
        return F.interpolate(images, (self.side, self.side), mode="bilinear", antialias=True)


def new_painter(vectors: Tensor, images: Tensor, seed: int) -> Painter:
    """Return a generator that has not been trained.

    Args:
        vectors: What a client with each image alone would send, float64 [m, P].
        images: [m, C, H, W] in [0, 1].
        seed: Seed of the weights.
    """
    with torch_stream(seed, "attack", "painter"):
        painter = Painter(vectors, images.shape[1], images.shape[-1])
    return painter.to(memory_format=torch.channels_last)  # half the time for 64 pixels


def train_painter(
    painter: Painter,
    vectors: Tensor,
    images: Tensor,
    seed: int,
    epochs: int,
    loss: Perceptual | None = None,
    stop: Event | None = None,
) -> Painter:
    """Train a generator on public images and return it with the weights of its best epoch.

    Args:
        painter: A new generator.
        vectors: What a client with each image alone would send, float64 [m, P].
        images: [m, C, H, W] in [0, 1].
        seed: Seed of the batches.
        epochs: Epochs of training; a fifth of the images is for validation.
        loss: Loss of pairs of pictures, added to the mean squared error.
        stop: Set when the generator is no longer needed.

    Raises:
        CancelledError: If ``stop`` is set.
    """
    draw = torch_generator(seed, "attack", "painter batches")
    order = torch.randperm(len(images), generator=draw)
    held = max(1, len(images) // 5)
    validation, train = order[:held], order[held:]
    adam = torch.optim.Adam(painter.parameters(), lr=RATE)
    best, kept = -1.0, {name: t.clone() for name, t in painter.state_dict().items()}
    for _ in range(epochs):
        for part in train[torch.randperm(len(train), generator=draw)].split(BATCH):
            if stop is not None and stop.is_set():
                raise CancelledError
            pair = painter(vectors[part]), images[part]
            error = F.mse_loss(*pair)
            if loss is not None:
                error = error + SHARE * loss(*pair).mean()
            adam.zero_grad()
            error.backward()
            adam.step()
        with torch.no_grad():
            quality = float(psnr(painter(vectors[validation]), images[validation]).mean())
        if quality > best:
            best, kept = quality, {name: t.clone() for name, t in painter.state_dict().items()}
    painter.load_state_dict(kept)
    return painter.eval()


@dataclass(frozen=True)
class _Case:
    """One item that clients send, with everything that attacker and scorer need."""

    messages: Sequence[Message]
    rows: Sequence[Rows]  # content of the messages
    pictures: Tensor  # public images [m, C, H, W] in [0, 1]
    vectors: Tensor  # what a client with each public image alone would send, [m, P]
    others: Pictures  # images that no client holds
    candidates: Tensor  # the same images [n, C, H, W] in [0, 1]
    alone: Tensor  # what a client with each of these alone would send, [n, P]
    held: Sequence[Pictures]  # images of each message's client
    truth: Sequence[Tensor]  # the same images, [k, C, H, W] each

    @property
    def item(self) -> str:
        """The item's name."""
        return self.messages[0].item


@dataclass(frozen=True)
class _Drawn:
    """Generated pictures and the true ones."""

    name: str  # name of their figures, with a placeholder for the measure
    found: Tensor  # [n, C, H, W]
    truth: Tensor  # likewise
    groups: np.ndarray  # group of each in the bootstrap, [n]
    domains: np.ndarray  # ids of source domains, [n]


class StyleInversion(Attack):
    """The scorer's half: are the client's own images nearer to the pictures than others are?

    An attacking client inverts what the server passes on to it from others, if anything.
    """

    kind = "style-inversion"
    version = 3
    wants = "styles or statistics of images that two clients send"
    judged = True
    epochs = 60

    def reads(self, item: str) -> bool:
        """Return whether the item is anything but a model."""
        return item != "weights"

    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack each statistic that clients send."""
        seen = scene.messages()
        sent = [m for m in seen if m.up and self.reads(m.item)]
        if scene.attacker == "client":
            sent = list(_passed_on(scene, [m for m in seen if not m.up]))
        names = few_clients({message.client for message in sent}, scene.draw("clients"))
        public, others = scene.part("id_val", MOST_PUBLIC), scene.part("id_test", MOST_OTHERS)
        shadow = Shadow(scene.settings, scene.federation, public + others)
        count = 0
        for chosen in by_item(sent, names):
            first = [m for m in chosen if m.when == chosen[0].when]
            rows = [shadow.rows(message) for message in first]
            readable = [row for row in rows if row is not None and row.keys is None]
            fits = len(readable) == len(first) >= 2 and isinstance(first[0].value, Tensor)
            if fits and shadow.answers(first[0]):
                count += 1
                scene.step(f"{self.kind} of {first[0].item}", 0, 2)
                held = [scene.pictures(scene.federation.clients[m.client]) for m in first]
                places = range(len(public) + len(others))
                vectors = shadow.vectors(first[0].exchange.task, first[0].item, places)
                case = _Case(
                    messages=first,
                    rows=readable,
                    pictures=to_float(torch.from_numpy(public.images)),
                    vectors=vectors[: len(public)],
                    others=others,
                    candidates=to_float(torch.from_numpy(others.images)),
                    alone=vectors[len(public) :],
                    held=held,
                    truth=[to_float(torch.from_numpy(h.images)) for h in held],
                )
                yield self._result(scene, case, None)
                if scene.judges.lpips is not None:
                    yield self._result(scene, case, scene.judges.lpips)
        if not count:
            raise self.nothing(scene)

    def _result(self, scene: Scene, case: _Case, loss: Perceptual | None) -> AttackResult:
        seed, item, held, truth = scene.settings.seed, case.item, case.held, case.truth
        others, candidates = case.others, case.candidates
        small, given = (
            F.adaptive_avg_pool2d(i, THUMBNAIL).flatten(1).double()
            for i in (case.pictures, candidates)
        )
        seen, stop = (case.vectors, small), Event()
        new = [new_painter(vectors, case.pictures, seed) for vectors in seen]

        def train(number: int) -> Painter:
            whole = new[number], seen[number], case.pictures
            return train_painter(*whole, seed, self.epochs, loss, stop)

        scene.step(f"{self.kind} of {item}", 1, 2)
        painter, baseline = in_threads(train, range(len(new)), scene.workers, stop)
        with torch.no_grad():
            guesses = [painter(row.vectors) for row in case.rows]
            alone, copied = painter(case.alone), baseline(given)
        places = range(len(held))
        pairs = [nearest(guesses[i], truth[i]) for i in places]
        ranks = [rank(guesses[i], truth[i], held[i], candidates, others) for i in places]
        wrong = [
            rank(guesses[(i + 1) % len(held)], truth[i], held[i], candidates, others)
            for i in places
        ]
        draw = scene.draw("bootstrap", item)

        def ranks_of(drawn: Tensor) -> list[np.ndarray]:
            """Return the ranks of images that no client holds, each by its generated picture."""
            some = scene.draw("planted", item).permutation(len(others))[:MOST_PLANTED]
            rest = [np.arange(len(others)) != place for place in some]
            return [
                rank(drawn[[at]], candidates[[at]], others[[at]], candidates[of], others[of])
                for at, of in zip(some.tolist(), rest, strict=True)
            ]

        near, true = torch.cat(pairs), torch.cat(list(truth))
        client = np.repeat(np.arange(len(held)), [len(h) for h in held])
        domain = np.concatenate([h.domains for h in held])
        each = np.arange(len(others))
        drawn = [
            _Drawn("{}", near, true, client, domain),
            _Drawn("sample_{}", alone, candidates, each, others.domains),
            _Drawn("{}_of_images", copied, candidates, each, others.domains),
        ]
        by_name = {"{}": ranks, "sample_{}": ranks_of(alone), "{}_of_images": ranks_of(copied)}
        figures = {
            "rank": interval(ranks, draw),
            "sample_rank": interval(by_name["sample_{}"], draw),
        }
        measures = measures_of(scene, near.shape[1])
        values = [{n: f(one.found, one.truth) for n, f in measures.items()} for one in drawn]
        planted = planted_leak(interval(by_name["{}_of_images"], draw), FOUND)
        for name in ("psnr", "ssim"):
            for one, of in zip(drawn, values, strict=True):
                figures[one.name.format(name)] = _interval(one, of[name], draw)
        for name, shares in by_name.items():
            figures[name.format("retrieved")] = interval([s > 1 - TOP for s in shares], draw)
        judged_by = "" if loss is None else PERCEPTUAL
        result = AttackResult(
            item=item,
            about=("single images" if case.rows[0].each else "clients") + judged_by,
            up=scene.attacker != "client",
            call=case.messages[0].when[1],
            times=1,
            messages=len(held),
            targets=len(true),
            bytes=nbytes(case.messages[0].value),
            no_leak=no_leak(interval(wrong, draw), 0.5),
            planted_leak=planted,
            figures=figures,
        ).withheld()
        if not result.figures:
            return result
        if near.shape[1] == 3:
            self.pictures[item if loss is None else f"{item}-lpips"] = sheet(
                true, near, values[0]["psnr"]
            )
        return self._judge(scene, result, drawn, values)

    @staticmethod
    def _judge(
        scene: Scene,
        result: AttackResult,
        drawn: Sequence[_Drawn],
        values: Sequence[Mapping[str, Tensor]],
    ) -> AttackResult:
        """Add the networks' figures, and figures of each domain; ``values`` are by measure."""
        figures = dict(result.figures)
        by_domain: dict[str, dict[str, Interval]] = {name: {} for name in scene.federation.sources}
        inception = scene.judges.inception if drawn[0].truth.shape[1] == 3 else None
        seen: dict[int, Seen] = {}  # of true pictures, which two generated sets can share
        for one, of in zip(drawn, values, strict=True):
            draw = scene.draw("bootstrap", result.item, result.about, one.name)
            if "lpips" in of:
                figures[one.name.format("lpips")] = _interval(one, of["lpips"], draw)
            places = {d: np.flatnonzero(one.domains == i) for i, d in enumerate(by_domain)}
            for domain, at in places.items():
                for name, value in of.items() if len(at) else ():
                    by_domain[domain][one.name.format(name)] = _interval(one, value, draw, at)
            if inception is not None:
                if id(one.truth) not in seen:
                    seen[id(one.truth)] = inception(one.truth)
                guesses, truth = inception(one.found), seen[id(one.truth)]
                for domain, at in {"": np.arange(len(one.groups)), **places}.items():
                    into = by_domain[domain] if domain else figures
                    for name, figure in judged(guesses[at], truth[at]).items():
                        into[one.name.format(name)] = figure
        return result.model_copy(update={"figures": figures, "by_domain": by_domain})


def _passed_on(scene: Scene, received: Sequence[Message]) -> Iterator[Message]:
    """Yield others' messages, reduced to the rows that reached the attacking client unchanged.

    Only the scorer knows whose rows these are: it looks for the same numbers in what clients sent.
    """
    arrived: set[tuple[tuple[int, ...], bytes]] = set()
    widths = {
        value.shape[-2:]
        for exchange in scene.exchanges
        for value in exchange.sent.values()
        if isinstance(value, Tensor) and value.dim() > 1
    }
    for message in received:
        for _, leaf in leaves(message.value):
            if isinstance(leaf, Tensor) and leaf.shape[-2:] in widths:
                arrived |= {_name(row) for row in leaf.reshape(-1, *leaf.shape[-2:])}
    for exchange in scene.exchanges:
        for item, value in exchange.sent.items():
            if item == "weights" or not isinstance(value, Tensor) or value.dim() < 2:
                continue
            rows = [_name(row) in arrived for row in value.reshape(-1, *value.shape[-2:])]
            if any(rows) and exchange.task.client != scene.own:
                kept = value if value.dim() == 2 else value[torch.tensor(rows)]
                yield Message(item, kept, True, exchange)


def _name(row: Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(row.shape), row.contiguous().numpy().tobytes()


def _interval(
    drawn: _Drawn, values: Tensor, draw: np.random.Generator, at: np.ndarray | None = None
) -> Interval:
    """Return the mean of a measure's values, of all or some pictures, with its interval."""
    places = np.arange(len(values)) if at is None else at
    groups = drawn.groups[places]
    return interval([values.numpy()[places[groups == g]] for g in np.unique(groups)], draw)
