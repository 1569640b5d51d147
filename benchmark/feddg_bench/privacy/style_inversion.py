"""Style inversion: a generator, trained on public images, draws the image of a style.

PARDON's Table IV and FISC's Table 9 train a generator from styles to images on public ones and
apply it to what clients send: to styles of single images (sample level) or of all that a client
holds (client level). Ours is a small one: a linear layer to 4 x 4 maps, then nearest-neighbour
upsampling and 3 x 3 convolutions up to the image's side, trained with the mean squared error. Of
its epochs the one counts that has the best PSNR on a fifth of the public images. Beside it stands
what the same generator makes of images themselves, of 8 x 8 pixels: the papers' baseline, which is
the planted leak too; and what it makes of styles of single images, whether they are sent or not.
The papers report FID and Inception Scores, which say how good pictures are, not whose; here are
PSNR, SSIM, and how the true image ranks among others of its domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_bench.common.streams import torch_generator, torch_stream
from feddg_bench.core.messages import nbytes
from feddg_bench.data.augment import to_float
from feddg_bench.privacy.attack import Attack, Scene, interval, no_leak, planted_leak
from feddg_bench.privacy.capture import Message, by_item
from feddg_bench.privacy.gradient_inversion import nearest, psnr, rank, ssim
from feddg_bench.privacy.membership import MOST_CLIENTS, MOST_OTHERS, MOST_PLANTED
from feddg_bench.privacy.pictures import sheet
from feddg_bench.privacy.shadow import Rows, Shadow
from feddg_bench.records.attacks import AttackResult

MOST_PUBLIC = 1000
"""Images on which the generator is trained and validated."""
BATCH, RATE, WIDTH = 32, 2e-3, 64
FOUND = 0.7
"""Rank that a planted leak must reach."""
THUMBNAIL = 8
"""Side of what the baseline sees of an image."""


class Painter(nn.Module):
    """The attacker's half: vectors [n, P] to images [n, C, H, W] in [0, 1].

    Args:
        vectors: Of public images, [m, P]; others are standardised as these.
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
        """Return the images of vectors."""
        standard = ((vectors - self.mean) / self.std).clamp(-10, 10).float()
        maps: Tensor = self.grow(self.start(standard).view(-1, WIDTH, 4, 4))
        images = maps.sigmoid()
        if images.shape[-1] == self.side:
            return images
        return F.interpolate(images, (self.side, self.side), mode="bilinear", antialias=True)


def train_painter(vectors: Tensor, images: Tensor, seed: int, epochs: int) -> Painter:
    """Return a generator trained on public images, as it was after its best epoch.

    Args:
        vectors: What each image would send alone, float64 [m, P].
        images: [m, C, H, W] in [0, 1].
        seed: Of weights and batches.
        epochs: Of training; a fifth of the images validates them.
    """
    with torch_stream(seed, "attack", "painter"):
        painter = Painter(vectors, images.shape[1], images.shape[-1])
    draw = torch_generator(seed, "attack", "painter batches")
    order = torch.randperm(len(images), generator=draw)
    held = max(1, len(images) // 5)
    validation, train = order[:held], order[held:]
    adam = torch.optim.Adam(painter.parameters(), lr=RATE)
    best, kept = -1.0, {name: t.clone() for name, t in painter.state_dict().items()}
    for _ in range(epochs):
        for part in train[torch.randperm(len(train), generator=draw)].split(BATCH):
            loss = F.mse_loss(painter(vectors[part]), images[part])
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            quality = float(psnr(painter(vectors[validation]), images[validation]).mean())
        if quality > best:
            best, kept = quality, {name: t.clone() for name, t in painter.state_dict().items()}
    painter.load_state_dict(kept)
    return painter.eval()


class StyleInversion(Attack):
    """The scorer's half: are the client's own images nearer to what was drawn than others?"""

    kind = "style-inversion"
    epochs = 60

    def measure(self, scene: Scene) -> Iterator[AttackResult]:
        """Attack each statistic that clients send."""
        sent = [m for m in scene.messages() if m.up and m.item != "weights"]
        names = sorted({message.client for message in sent})[:MOST_CLIENTS]
        public, others = scene.part("id_val", MOST_PUBLIC), scene.part("id_test", MOST_OTHERS)
        shadow = Shadow(scene.settings, scene.federation, public + others)
        count = 0
        for chosen in by_item(sent, names):
            first = [m for m in chosen if m.when == chosen[0].when]
            rows = [shadow.rows(message) for message in first]
            there = [row for row in rows if row is not None and row.keys is None]
            fits = len(there) == len(first) >= 2 and isinstance(first[0].value, Tensor)
            if fits and shadow.answers(first[0]):
                count += 1
                yield self._item(scene, shadow, first, there, len(public))
        if not count:
            raise self.nothing(scene, "styles or statistics of images that two clients send")

    def _item(
        self,
        scene: Scene,
        shadow: Shadow,
        messages: Sequence[Message],
        rows: Sequence[Rows],
        public: int,
    ) -> AttackResult:
        item, seed = messages[0].item, scene.settings.seed
        others = scene.part("id_test", MOST_OTHERS)
        scene.step(f"{self.kind} of {item}", 0, 3)
        task = messages[0].exchange.task
        vectors = shadow.vectors(task, item, range(public + len(others)))
        seen = to_float(torch.from_numpy(scene.part("id_val", MOST_PUBLIC).images))
        candidates = to_float(torch.from_numpy(others.images))
        scene.step(f"{self.kind} of {item}", 1, 3)
        painter = train_painter(vectors[:public], seen, seed, self.epochs)
        scene.step(f"{self.kind} of {item}", 2, 3)
        small = [
            F.adaptive_avg_pool2d(i, THUMBNAIL).flatten(1).double() for i in (seen, candidates)
        ]
        baseline = train_painter(small[0], seen, seed, self.epochs)
        held = [scene.pictures(scene.federation.clients[m.client]) for m in messages]
        truth = [to_float(torch.from_numpy(h.images)) for h in held]
        with torch.no_grad():
            found = [painter(row.vectors) for row in rows]
            alone, copied = painter(vectors[public:]), baseline(small[1])
        places = range(len(held))
        pairs = [nearest(found[i], truth[i]) for i in places]
        ranks = [rank(found[i], truth[i], held[i], candidates, others) for i in places]
        wrong = [
            rank(found[(i + 1) % len(held)], truth[i], held[i], candidates, others) for i in places
        ]
        draw = scene.draw("bootstrap", item)

        def ranks_of(drawn: Tensor) -> list[np.ndarray]:
            """Return the ranks of images that nobody holds by what was drawn of each."""
            some = scene.draw("planted", item).permutation(len(others))[:MOST_PLANTED]
            rest = [np.arange(len(others)) != place for place in some]
            return [
                rank(drawn[[at]], candidates[[at]], others[[at]], candidates[of], others[of])
                for at, of in zip(some.tolist(), rest, strict=True)
            ]

        figures = {"rank": interval(ranks, draw), "sample_rank": interval(ranks_of(alone), draw)}
        for name, measure in {"psnr": psnr, "ssim": ssim}.items():
            values = [measure(*pair).numpy() for pair in zip(pairs, truth, strict=True)]
            figures[name] = interval(values, draw)
            sample = measure(alone, candidates).numpy()[:, None]
            figures[f"sample_{name}"] = interval(list(sample), draw)
            figures[f"{name}_of_images"] = interval(
                list(measure(copied, candidates).numpy()[:, None]), draw
            )
        result = AttackResult(
            item=item,
            about="single images" if rows[0].each else "clients",
            up=True,
            call=messages[0].when[1],
            times=1,
            messages=len(messages),
            targets=sum(map(len, held)),
            bytes=nbytes(messages[0].value),
            no_leak=no_leak(interval(wrong, draw), 0.5),
            planted_leak=planted_leak(interval(ranks_of(copied), draw), FOUND),
            figures=figures,
        ).withheld()
        if result.figures and candidates.shape[1] == 3:
            near, true = torch.cat(pairs), torch.cat(truth)
            self.pictures[item] = sheet(true, near, psnr(near, true))
        return result
