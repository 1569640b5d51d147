"""Features of a data set's images by a frozen encoder, in a memory-mapped safetensors file.

Tensors: ``features`` float16 [N, V, D] in the order of the listing, ``paths`` (UTF-8, one a line),
and optionally ``text`` float32 [C, D]. Features of an unreadable image are 0. The name contains
what determines the features: data set, content, decoding, encoder, its weights, size and views.
`feddg_bench.runs.encode` writes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError, SettingsError, in_a_line
from feddg_bench.config.schema import AugmentSettings, DataSettings, FeatureSettings, RunSettings
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.federated import Federation
from feddg_bench.data.image_store import decoding_rule, known_fingerprint


@dataclass(frozen=True)
class FeatureStore:
    """Features that a run uses instead of images."""

    features: np.memmap[tuple[int, int, int], np.dtype[np.float16]]  # [N, V, D], read only
    fingerprint: str  # hash of the file
    encoder: str  # name of the encoder
    weights: str  # SHA-256 of its weights
    size: int  # side of the encoded images in pixels
    text: NDArray[np.float32]  # features of the classes' names [C, D]; [0, 0] if there are none
    logit_scale: float  # factor of cosines between image and text features
    unreadable: NDArray[np.int64]  # indices of skipped images, whose features are 0

    @property
    def path(self) -> Path:
        """The file."""
        return Path(str(self.features.filename))

    def replacing_images(self, federation: Federation) -> Federation:
        """Return a federation with these features for images."""
        return replace(
            federation,
            images=self.path,
            offset=self.features.offset,
            views=self.features.shape[1],
            size=1,
            channels=self.features.shape[2],
            pixels="float16",
            text=self.text,
            logit_scale=self.logit_scale,
        )


class Encoding(NamedTuple):
    """The settings that determine features, as parts of a run's."""

    features: FeatureSettings
    data: DataSettings
    augment: AugmentSettings

    @classmethod
    def of(cls, settings: RunSettings) -> Self | None:
        """Return the encoding of a run's settings, ``None`` if the run uses images."""
        if settings.features.encoder is None:
            return None
        return cls(settings.features, settings.data, settings.augment)

    def path(self, dataset: DomainDataset, content: str, weights: str, home: Path) -> Path:
        """Return the file of a data set's features in the cache folder.

        ``content`` is its fingerprint, and ``weights`` the encoder's SHA-256, or a pattern.
        """
        rule = decoding_rule(dataset.decoded(self.data))
        if self.features.views > 1:
            drawn = hashlib.sha256(self.augment.model_dump_json().encode()).hexdigest()
            rule += f"+{self.features.views}views{drawn[:8]}"
        encoder = re.sub(r"[^A-Za-z0-9.+]", "_", str(self.features.encoder))
        name = f"{dataset.name}-v{dataset.version}-{content}-{encoder}-{weights}"
        return home / "features" / f"{name}-{self.data.image_size}px{rule}.safetensors"

    def find(self, dataset: DomainDataset, home: Path) -> Path:
        """Return the file of a data set's features, which must be there.

        Raises:
            SettingsError: If there is none, or there are those of several weights.
        """
        content = known_fingerprint(dataset, home)
        pattern = self.path(dataset, content, f"{self.features.digest or ''}*", home)
        found = sorted(pattern.parent.glob(pattern.name))
        encoder, size = self.features.encoder, self.data.image_size
        what = f"features of {dataset.title} by {encoder} at {size} px"
        if not found:
            views = f" --views {self.features.views}" if self.features.views > 1 else ""
            raise SettingsError(
                f"there are no {what} in {pattern.parent}: make them with `feddg-bench data encode "
                f"{dataset.name} --encoder {encoder} --size {size}{views}`"
            )
        if len(found) > 1:
            weights = ", ".join(path.name.rsplit("-", 2)[1][:8] for path in found)
            raise SettingsError(
                f"there are {what} for several weights: choose with features.digest, one of "
                f"{weights}"
            )
        return found[0]


def open_features(path: Path, images: int, *, skipped: bool = False) -> FeatureStore:
    """Open the features of ``images`` images, of which unreadable ones are ``skipped``.

    Raises:
        DataError: If the file cannot be read, or holds features of other images.
    """
    with opened(path) as file, path.open("rb") as plain:
        start = 8 + int.from_bytes(plain.read(8), "little")  # of the first tensor, the features
        plain.seek(0)
        digest = hashlib.file_digest(plain, partial(hashlib.blake2b, digest_size=16))
        shape = tuple(file.get_slice("features").get_shape())
        facts, names = file.metadata(), file.keys()
        if shape[0] != images:
            raise DataError(
                f"{path} holds features of {shape[0]} images, expected {images}: delete it and "
                f"encode again"
            )
        features = np.memmap(path, np.float16, "r", start, shape)
        empty = ~features[:, 0].any(axis=1) if skipped else np.empty(0, bool)
        return FeatureStore(
            features,
            digest.hexdigest(),
            facts["encoder"],
            facts["weights"],
            int(facts["size"]),
            file.get_tensor("text") if "text" in names else np.empty((0, 0), np.float32),
            float(facts.get("logit_scale", 100)),
            np.flatnonzero(empty),
        )


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        DataError: If it cannot be read, or lacks what the block reads.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}: expected features in safetensors") from error
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"cannot read the features {path} ({in_a_line(error)}): expected a file as "
            f"`feddg-bench data encode` writes it"
        ) from error
