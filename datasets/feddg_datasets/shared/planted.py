"""Planted worlds: drawn images with known attainable accuracy on every domain.

Each image carries two cues to its class y, one of four:

- the *invariant* cue s, the orientation of a grating, names the class with probability Q in every
  domain, and any other class with equal probability;
- the *spurious* cue h, a tint, a lit corner or a grain, names the class with probability P[e] in
  domain e.

The table p_e(y, s, h) = p_e(y) q(s | y) r_e(h | y) gives the accuracy of a rule on a domain:

- the *invariant rule* predicts s;
- *ERM's rule* predicts the most probable class given s and h over the training domains, as does a
  large network that fits them all;
- the *best rule* does the same over the test domain.

After the coloured digits of Arjovsky et al., *Invariant Risk Minimization*, 2019, section 6.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from feddg_bench.common.streams import derive_seed
from feddg_bench.config.schema import DatasetSettings
from feddg_bench.data.dataset import DomainDataset, Listing, square

CLASSES = 4
DOMAINS = ("one", "two", "three", "four")

Array = NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]
Signed = Annotated[float, Field(ge=-1, le=1)]


class PlantedSettings(DatasetSettings):
    """Settings of every world."""

    q: float = Field(0.75, gt=0.25, le=1)
    """Q: probability with which the invariant cue names the class, in every domain."""
    noise: float = Field(0.08, ge=0, le=1)
    """Standard deviation of the noise of a pixel in [0, 1]."""
    contrast: float = Field(0.2, gt=0, le=0.4)
    """Amplitude of the grating: visibility of the invariant cue."""
    side: int = Field(16, ge=8, le=64)
    """Side of the drawn images in pixels; ``data.image_size`` resizes them."""
    images: int = Field(4000, ge=64, le=100_000)
    """Number of images per domain."""


class Cued(PlantedSettings):
    """Settings of a world with a spurious cue."""

    p: tuple[Signed, Signed, Signed, Signed] = (0.95, 0.85, 0.25, -0.9)
    """P: probability, for each domain, with which the spurious cue names the class; 0.25 makes it
    independent of the class; -0.9 means that it names the next class with probability 0.9."""


class Planted(DomainDataset):
    """A world; its subclasses define the spurious cue and how the domains differ."""

    domains = DOMAINS
    letters: ClassVar[Mapping[str, str]] = {"one": "o", "two": "t", "three": "h", "four": "f"}
    classes = tuple("abcd")
    prompts: ClassVar[Mapping[str, str]] = {  # the invariant cue
        "a": "a photo of horizontal stripes",
        "b": "a photo of vertical stripes",
        "c": "a photo of diagonal stripes that rise",
        "d": "a photo of diagonal stripes that fall",
    }
    licence = "CC0"
    source = "it is drawn here"
    no_download = "it is drawn here"
    default_recipe = "planted"
    synthetic = True
    # In every world, ERM's rule is worst in this scenario; in the world of styles, the test domain
    # lies outside the hull of the training domains.
    default_scenario: ClassVar[Mapping[str, str]] = {"ltdo": "ot-h-f"}
    Settings: ClassVar[type[PlantedSettings]] = PlantedSettings
    settings: PlantedSettings

    # ------------------------------------------------------------------------- the table

    def table(self, domain: str) -> Array:
        """Return p(y, s, h) of a domain, [4, 4, 4]."""
        settings, e = self.settings, self.domains.index(domain)
        p = settings.p[e] if isinstance(settings, Cued) else 1 / CLASSES
        spurious = named(p) if p >= 0 else np.roll(named(-p), 1, axis=1)
        return self.prior(e)[:, None, None] * named(settings.q)[:, :, None] * spurious[:, None, :]

    def prior(self, domain: int) -> Array:
        """Return p(y) of a domain, [4]."""
        return np.full(CLASSES, 1 / CLASSES)

    def answers(self, train: Sequence[str], test: str) -> dict[str, float]:
        """Return the accuracies of the rules ``invariant``, ``erm`` and ``best`` on a domain."""
        seen, unseen = np.mean([self.table(domain) for domain in train], axis=0), self.table(test)
        s, h = np.indices((CLASSES, CLASSES))
        return {
            "invariant": float(unseen[s, s, h].sum()),
            "erm": float(unseen[seen.argmax(0), s, h].sum()),
            "best": float(unseen.max(0).sum()),
        }

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        """Class, invariant cue, spurious cue and domain of each image, [4, n].

        Counts follow the table to within one image, so a rule's accuracy on a domain is that of the
        population.
        """
        columns = []
        for number, domain in enumerate(self.domains):
            share = (self.settings.images * self.table(domain)).ravel()
            counts = np.floor(share + 1e-9).astype(np.int64)
            last = np.argsort(counts - share, kind="stable")[: self.settings.images - counts.sum()]
            counts[last] += 1
            cues = np.unravel_index(np.repeat(np.arange(counts.size), counts), (CLASSES,) * 3)
            columns.append(np.stack([*cues, np.full(self.settings.images, number)]))
        return np.concatenate(columns, axis=1)

    # ------------------------------------------------------------------------- the images

    def scan(self) -> Listing:
        """List the images, domain by domain."""
        labels, _, _, domains = self.cells
        paths = tuple(
            f"{self.domains[domain]}/{self.classes[label]}/{index:06d}.png"
            for index, (label, domain) in enumerate(zip(labels, domains, strict=True))
        )
        return Listing(paths, labels, domains)

    def fingerprint(self) -> str:
        """Return a hash over the settings, which determine every pixel."""
        text = f"{self.name} v{self.version} {self.settings.model_dump_json()}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def stamp(self) -> str:
        """Return the fingerprint: there are no files to read."""
        return self.fingerprint()

    def read(self, index: int, size: int) -> NDArray[np.uint8]:
        """Draw an image and resize it."""
        from PIL import Image

        _, s, h, domain = (int(value) for value in self.cells[:, index])
        rng = np.random.Generator(np.random.PCG64(derive_seed(0, "planted", self.name, index)))
        picture = grating(s, self.settings.side, self.settings.contrast, rng)
        picture = self.draw(picture, h, domain, rng)
        picture = picture + self.settings.noise * normal(picture.shape, rng)
        pixels = np.rint(picture.clip(0, 1) * 255).astype(np.uint8)
        return square(Image.fromarray(pixels), size)

    def draw(self, picture: Array, h: int, domain: int, rng: np.random.Generator) -> Array:
        """Return a picture [side, side, 3] in [0, 1] with the spurious cue, or in its style."""
        return picture


# --------------------------------------------------------------------------- drawing tools
# Every machine draws the same pixels: IEEE 754 defines all operations to the last bit.


def named(probability: float) -> Array:
    """Return p(cue | class), [4, 4]: a cue names its class with this probability.

    Other classes are equally probable.
    """
    table = np.full((CLASSES, CLASSES), (1 - probability) / (CLASSES - 1))
    np.fill_diagonal(table, probability)
    return table


def grating(orientation: int, side: int, contrast: float, rng: np.random.Generator) -> Array:
    """Return stripes [side, side, 3] around 0.45: horizontal, vertical or along a diagonal.

    The phase and the brightness of each channel are random.
    """
    row, column = np.indices((side, side))
    along = (row, column, row + column, row - column)[orientation]
    turns = (along / (6 * side / 16) + rng.random()) % 1
    wave = 4 * np.abs(turns - 0.5) - 1
    return (0.45 + contrast * wave)[..., None] * (0.8 + 0.2 * rng.random(3))


def normal(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return approximately normal numbers of mean 0 and variance 1: sums of four uniform ones."""
    draws = rng.random((4, *shape))
    sums: Array = draws[0] + draws[1] + draws[2] + draws[3]
    return (sums - 2) * 1.7320508075688772  # each uniform number has variance 1/12
