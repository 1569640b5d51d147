"""Features of a data set, computed once: encoding, import from a file, and a probe of their worth.

Images are read from their files and never stored. Pieces are appended to an unfinished file, so
that a repeated command goes on where a killed one stopped, and gives the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import nn

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.parallel import in_threads
from feddg_bench.common.streams import torch_generator
from feddg_bench.config.keys import file_digest
from feddg_bench.data.augment import Augment, to_float
from feddg_bench.data.dataset import DomainDataset, UnreadableError, read_checked
from feddg_bench.data.decoding import unreadable_images
from feddg_bench.data.feature_store import Encoding, FeatureStore, open_features, opened
from feddg_bench.data.image_store import OnDecoded, known_fingerprint
from feddg_bench.engine.compatibility import is_rgb
from feddg_bench.engine.encoders import encoder_digest

PIECE = 128
"""Images that are encoded at a time."""


@torch.inference_mode()
def encode_dataset(
    dataset: DomainDataset,
    encoding: Encoding,
    encoder: nn.Module,
    home: Path,
    device: str = "cpu",
    progress: OnDecoded | None = None,
) -> Path:
    """Encode every image, unless that is done, and return the file.

    Args:
        dataset: The data set.
        encoding: Name of the encoder, views, size, decoding and augmentation.
        encoder: A module from images [B, 3, S, S] in [0, 1] to features [B, D].
        home: The cache folder.
        device: Where to compute.
        progress: Called with the number of images done and their total.

    Raises:
        DataError: If images cannot be decoded, features are not finite, or the disk is full.
        SettingsError: If images are not RGB.
    """
    if not is_rgb(dataset):
        raise SettingsError(f"encoders read RGB images, and those of {dataset.name} are not")
    size, weights = encoding.data.image_size, encoder_digest(encoder)
    path = encoding.path(dataset, known_fingerprint(dataset, home), weights, home)
    decoded, count = dataset.decoded(encoding.data), len(dataset.records().paths)
    encoder, augment = encoder.to(device), Augment(encoding.augment)
    width = encoder(torch.zeros(1, 3, size, size, device=device)).shape[1]
    facts, tail = {"weights": weights}, {}
    if (texts := getattr(encoder, "texts", None)) is not None and dataset.classes:
        prompts = [dataset.prompt(name) for name in dataset.classes]
        tail["text"] = texts(prompts).float().cpu().numpy()
        facts |= {"prompts": json.dumps(prompts), "logit_scale": str(encoder.logit_scale)}

    def read(index: int) -> tuple[NDArray[Any], str]:
        try:
            return read_checked(decoded, index, size), ""
        except UnreadableError as error:
            return np.zeros((size, size, 3), np.uint8), error.why

    def pieces(start: int) -> Iterator[NDArray[np.float16]]:
        if path.exists():  # with other texts, or another process wrote it
            yield open_features(path, count).features[start:]
            return
        images = in_threads(read, range(start, count))
        while piece := list(islice(images, PIECE)):
            faults = {start + i: why for i, (_, why) in enumerate(piece) if why}
            if faults and not decoded.skip_unreadable:
                raise DataError(f"{dataset.title}: {unreadable_images(dataset, faults)}")
            pixels, found = torch.from_numpy(np.stack([image for image, _ in piece])), []
            for view in range(encoding.features.views):
                draw = torch_generator(0, "views", start // PIECE, view)
                batch = augment(pixels, draw) if view else to_float(pixels)
                found.append(encoder(batch.to(device)).float().cpu())
            features = torch.stack(found, 1).numpy().astype(np.float16)
            features[[bool(why) for _, why in piece]] = 0
            yield features
            start += len(piece)
            if progress is not None:
                progress(start, count)

    _write(path, dataset, encoding, width, facts, tail, pieces)
    return path


def _write(
    path: Path,
    dataset: DomainDataset,
    encoding: Encoding,
    width: int,
    facts: Mapping[str, str],
    tail: Mapping[str, NDArray[Any]],
    pieces: Callable[[int], Iterator[NDArray[np.float16]]],
) -> None:
    """Write a safetensors file unless it is there with these facts and those of the encoding.

    ``pieces`` yields the rows of its features from one on; ``tail`` holds further tensors.

    Raises:
        DataError: If it cannot be written, or features are not finite.
    """
    paths, name, size = dataset.records().paths, encoding.features.encoder, encoding.data.image_size
    shape = len(paths), encoding.features.views, width
    row = 2 * shape[1] * width
    end = row * len(paths)
    facts = {**facts, "encoder": str(name), "size": str(size)}
    header: dict[str, Any] = {"__metadata__": dict(sorted(facts.items()))}
    header["features"] = {"dtype": "F16", "shape": shape, "data_offsets": [0, end]}
    tail = {**tail, "paths": np.frombuffer("\n".join(paths).encode(), np.uint8)}
    for name, array in tail.items():
        start, end = end, end + array.nbytes
        kind = {"float32": "F32", "uint8": "U8"}[str(array.dtype)]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    part = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), path.open("rb") as whole:
            if whole.read(len(head)) == head:
                return
        with FileLock(path.with_suffix(".lock")), part.open("a+b") as file:
            file.seek(0)
            if file.read(len(head)) != head:
                file.truncate(0)
                file.write(head)
            done = (file.seek(0, os.SEEK_END) - len(head)) // row
            done = min(done, len(paths)) // PIECE * PIECE
            file.truncate(len(head) + done * row)
            for features in pieces(done):
                if not np.isfinite(features).all():
                    raise DataError(
                        f"features of {dataset.title} are not finite numbers of 16 bits: scale "
                        f"them, or choose another encoder"
                    )
                file.write(features.tobytes())
                file.flush()
            for array in tail.values():
                file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        path.with_suffix(".lock").unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write {end / 2**20:,.0f} MiB of features to {path.parent}: {error.strerror}; "
            f"make room, or name another folder with --cache-dir or FEDDG_CACHE"
        ) from error


def import_features(source: Path, dataset: DomainDataset, encoding: Encoding, home: Path) -> Path:
    """Copy features that were computed elsewhere into the cache, in the order of the listing.

    Args:
        source: A safetensors file with ``features`` [N, V, D] or [N, D], ``paths`` (uint8, UTF-8,
            one a line), and optionally ``text`` [C, D] and the number ``logit_scale``.
        dataset: The data set whose images they are.
        encoding: Name of the encoder, size of its images, decoding and augmentation.
        home: The cache folder.

    Raises:
        DataError: If the file cannot be read, its paths are not those of the data set, or a shape
            does not fit.
    """
    with opened(source) as file:
        names, metadata = file.keys(), file.metadata() or {}
        features = file.get_tensor("features")
        lines = bytes(file.get_tensor("paths")).decode().split("\n")
        tail = {name: file.get_tensor(name).astype(np.float32) for name in names if name == "text"}
        if "logit_scale" in names:
            metadata["logit_scale"] = str(float(file.get_tensor("logit_scale").item()))
    features = features[:, None] if features.ndim == 2 else features
    places = {line: place for place, line in enumerate(lines)}
    wanted = dataset.records().paths
    lacking = [path for path in wanted if path not in places]
    if lacking or features.ndim != 3 or len(features) != len(lines):
        raise DataError(
            f"{source} holds features {list(features.shape)} of {len(lines)} paths and lacks "
            f"{len(lacking):,} of {dataset.title}'s {len(wanted):,}"
            f"{f', such as {lacking[0]}' if lacking else ''}: expected [N, V, D], and a path such "
            f"as {wanted[0]} for each"
        )
    _, views, width = features.shape
    classes = len(dataset.classes)
    if "text" in tail and tail["text"].shape != (classes, width):
        raise DataError(
            f"{source} holds text features {list(tail['text'].shape)}: expected [{classes}, "
            f"{width}], a row for each of {', '.join(dataset.classes[:5])} ..."
        )
    ordered = features[[places[path] for path in wanted]].astype(np.float16)
    settings = encoding.features.model_copy(update={"views": views})
    encoding = encoding._replace(features=settings)
    facts = {name: metadata[name] for name in ("logit_scale", "prompts") if name in metadata}
    facts["weights"] = weights = metadata.get("weights") or file_digest(source)
    path = encoding.path(dataset, known_fingerprint(dataset, home), weights, home)
    _write(path, dataset, encoding, width, facts, tail, lambda start: iter([ordered[start:]]))
    return path


class Probe(NamedTuple):
    """Accuracies on a held-out tenth of each domain, from 0 to 1."""

    chance: float  # share of the largest class
    class_means: float  # nearest class mean
    ridge: float  # ridge regression on one-hot labels

    @property
    def lacks_semantics(self) -> bool:
        """Whether class means are closer to chance than to ridge, or ridge is near chance."""
        middle = (self.chance + self.ridge) / 2
        return self.class_means < middle or self.ridge - self.chance < (1 - self.chance) / 4


def probe(store: FeatureStore, labels: NDArray[Any], classes: int) -> Probe:
    """Return how well the clean views of a data set tell its classes apart."""
    clean = store.features[:, 0].astype(np.float32)
    x = torch.from_numpy(np.delete(clean, store.unreadable, 0))
    y = torch.from_numpy(np.delete(labels, store.unreadable))
    held = torch.arange(len(x)) % 10 == 0  # images are listed by domain and class
    centre = x[~held].mean(0)
    x = torch.nn.functional.normalize(x - centre)
    train, truth = x[~held], torch.nn.functional.one_hot(y[~held], classes).float()
    means = torch.nn.functional.normalize(truth.T @ train)
    gram = train.T @ train + 1e-3 * len(train) / x.shape[1] * torch.eye(x.shape[1])
    solved = torch.linalg.solve(gram, train.T @ (truth - truth.mean(0)))
    right = [
        (x[held] @ w + b).argmax(1) == y[held] for w, b in ((means.T, 0.0), (solved, truth.mean(0)))
    ]
    chance = torch.bincount(y).max() / len(y)
    return Probe(float(chance), *(float(each.float().mean()) for each in right))
