"""Features of a data set's images by a frozen encoder, in a memory-mapped safetensors file.

Tensors: ``features`` float16 [N, V, D] in the order of the listing, ``paths`` (UTF-8, one a line),
and optionally ``text`` float32 [C, D]. Features of an unreadable image are 0. The name contains
what determines the features: data set, content, decoding, encoder, its weights, size and views.
`feddg_bench.runs.encode` writes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError, SettingsError, in_a_line
from feddg_bench.config.schema import AugmentSettings, DataSettings, FeatureSettings, RunSettings
from feddg_bench.data.dataset import DECODING, DomainDataset
from feddg_bench.data.federated import Federation
from feddg_bench.data.image_store import decoding_rule, known_fingerprint


@dataclass(frozen=True)
class FeatureStore:
    """Features that a run uses instead of images."""

    path: Path  # the file
    offset: int  # of the features in it, in bytes
    shape: tuple[int, int, int]  # N, V, D
    fingerprint: str  # hash of the file
    encoder: str  # name of the encoder
    weights: str  # SHA-256 of its weights
    size: int  # side of the encoded images in pixels
    text: NDArray[np.float32]  # features of the classes' names [C, D]; [0, 0] if there are none
    logit_scale: float  # factor of cosines between image and text features
    unreadable: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def replacing_images(self, federation: Federation) -> Federation:
        """Return a federation with these features for images."""
        return replace(
            federation,
            images=self.path,
            offset=self.offset,
            views=self.shape[1],
            size=1,
            channels=self.shape[2],
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

    @classmethod
    def recorded(cls, settings: Mapping[str, Any]) -> Self | None:
        """Return the encoding of a record's settings, ``None`` if the run used images."""
        if "features" not in settings:
            return None
        data = {k: v for k, v in settings["data"].items() if k in ("image_size", *DECODING)}
        features = FeatureSettings(**settings["features"])
        return cls(features, DataSettings(**data), AugmentSettings(**settings["augment"]))

    def path(self, dataset: DomainDataset, content: str, weights: str, home: Path) -> Path:
        """Return the file of a data set's features.

        Args:
            dataset: The data set.
            content: Its fingerprint.
            weights: SHA-256 of the encoder's weights, or a pattern.
            home: The cache folder.
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
    with opened(path) as file:
        metadata, names = file.metadata() or {}, {*file.keys()}
        features = file.get_slice("features")
        shape = tuple(features.get_shape())
        if features.get_dtype() != "F16" or shape[:1] != (images,):
            raise DataError(
                f"{path} holds features of {shape[0]} images, expected float16 of {images}: delete "
                f"it and encode again"
            )
        text = file.get_tensor("text") if "text" in names else np.empty((0, 0), np.float32)
    with path.open("rb") as plain:
        length = int.from_bytes(plain.read(8), "little")
        start = json.loads(plain.read(length))["features"]["data_offsets"][0]
        plain.seek(0)
        digest = hashlib.file_digest(plain, partial(hashlib.blake2b, digest_size=16))
    start += 8 + length
    unreadable = np.empty(0, np.int64)
    if skipped:
        clean = np.memmap(path, np.float16, "r", start, shape)[:, 0]
        unreadable = np.flatnonzero(~clean.any(axis=1))
    scale, size = float(metadata.get("logit_scale", 100)), int(metadata["size"])
    who = metadata["encoder"], metadata["weights"], size
    return FeatureStore(path, start, shape, digest.hexdigest(), *who, text, scale, unreadable)


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
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise DataError(
            f"cannot read the features {path} ({in_a_line(error)}): expected a file as "
            f"`feddg-bench data encode` writes it"
        ) from error
