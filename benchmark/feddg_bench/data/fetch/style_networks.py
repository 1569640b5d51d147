"""AdaIN's networks: checkpoints from public repositories, converted to one file of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.config.keys import file_digest
from feddg_bench.data.fetch.mirrors import Download
from feddg_bench.data.fetch.obtain import Receipt, Show, work_folder
from feddg_bench.data.fetch.transfer import fetch
from feddg_bench.data.locations import NETWORK_FILES
from feddg_bench.models.weights import load_tensors


@dataclass(frozen=True)
class WeightsDownload:
    """Checkpoints whose tensors go into one ``.safetensors`` file.

    Attributes:
        title: Description of the network.
        licence: Licence of the checkpoints.
        source: Human-readable origin of the checkpoints.
        file: Name of the resulting file.
        parts: Prefix of the tensors' names in that file -> the checkpoint that holds them.
        entry: Entry of each checkpoint that is its state dict; empty if the checkpoint is one.
        digest: SHA-256 of the resulting file, if known.
    """

    title: str
    licence: str
    source: str
    file: str
    parts: Mapping[str, Download]
    entry: str = ""
    digest: str | None = None


_DISTILLED = (
    "https://raw.githubusercontent.com/MingSun-Tse/Collaborative-Distillation/"
    "4a269dc90020721ef9b279b2926c62f5bcd6d209/trained_models"
)
_ORIGINAL = "https://github.com/naoto0804/pytorch-AdaIN/releases/download/v0.0.0"

WEIGHTS = {
    "vgg19": WeightsDownload(
        title="AdaIN's VGG-19 and decoder (Huang and Belongie, ICCV 2017; Naoto Inoue's copy)",
        licence="MIT",
        source="https://github.com/naoto0804/pytorch-AdaIN",
        file=NETWORK_FILES["vgg19"],
        parts={
            "encoder.": Download(
                "vgg_normalised.pth",
                (_ORIGINAL,),
                "sha256:804ca2835ecf7539f0cd2a7ac3c18ce81e6f8468969ae7117ac0c148d286bb4a",
                size=80_102_481,
            ),
            "decoder.": Download(
                "decoder.pth",
                (_ORIGINAL,),
                "sha256:379ca41d59f3a37eed3599bbbc2560c19da5c458870a5ffd3a9dd41aa88f9472",
            ),
        },
    ),
    "vgg19_16x": WeightsDownload(
        title="AdaIN's VGG-19 distilled to a sixteenth (Wang et al., CVPR 2020)",
        licence="MIT",
        source="https://github.com/MingSun-Tse/Collaborative-Distillation",
        file=NETWORK_FILES["vgg19_16x"],
        parts={
            "encoder.": Download(
                "20191110-132643_E20.pth",
                (f"{_DISTILLED}/wct_se_16x_new",),
                "sha256:d2f059cbcd6669556a43aadef58d20c8b280462c18b60a9e7424a14dd271cd6b",
                size=1_235_183,
            ),
            "decoder.": Download(
                "20191111-092553_E20.pth",
                (f"{_DISTILLED}/wct_se_16x_new_sd",),
                "sha256:902f65e2c6033d803d02df552eb898e5985190a7ae67d155e384826eec6f04cb",
                size=881_308,
            ),
        },
        entry="model",
        digest="b33ee8d8aeb4a3620e13a9a5311dca18d5f49ae5275d0f2542c60094b5465981",
    ),
}
"""Style back end -> its weights. AdaIN works at relu4_1, hence stage 4 of the distillation."""


def obtain_weights(
    offer: WeightsDownload,
    folder: Path,
    mirrors: Sequence[str] = (),
    show: Show = lambda _name, _unit: lambda _done, _total: None,
) -> list[str]:
    """Put the weights into a folder; existing ones are not fetched again.

    Args:
        offer: An entry of `WEIGHTS`.
        folder: Folder for the file `WeightsDownload.file`.
        mirrors: Folders of servers that are used instead of the known ones.
        show: Shows the progress of each download.

    Returns:
        Messages for the user: the files fetched, and how they were checked.

    Raises:
        SettingsError: If another file is in the way, or a mirror is not a web address.
        DataError: If a checkpoint cannot be fetched or fails its checks, or the file cannot be
            written.
    """
    from safetensors.torch import save

    receipt, place = Receipt({}, folder), folder / offer.file
    if place.exists():
        known = offer.digest or receipt.files.get(offer.file, {}).get("sha256")
        if file_digest(place) == known:
            return [f"{offer.file}: was here already"]
        if not receipt.made(offer.file, place):  # else it was intact once and damaged since
            raise SettingsError(
                f"{place} exists and is not what this command makes: move it away or choose "
                f"another folder with --to"
            )
    with work_folder(folder, mirrors) as work:
        tensors, notes, urls = {}, [], []
        for prefix, part in offer.parts.items():
            path = work / part.name
            urls.append(fetch(part.urls(mirrors), path, part, show(part.name, "bytes")))
            notes.append(f"{part.name}: {path.stat().st_size:,} bytes, checksum right")
            for name, tensor in load_tensors(path, offer.entry).items():
                tensors[prefix + name] = tensor.contiguous()
        content = save(tensors)
        digest = hashlib.sha256(content).hexdigest()
        if offer.digest not in (None, digest):
            raise DataError(
                f"{offer.file} has SHA-256 {digest} instead of {offer.digest}: this version of "
                f"safetensors writes other bytes; install 0.8.0"
            )
        about = {"url": urls, "licence": offer.licence, "source": offer.source, "sha256": digest}
        receipt.note(offer.file, [place], about)
        write_whole(place, content)
    return [*notes, f"{offer.file}: {len(content):,} bytes, SHA-256 {digest}"]
