"""Contact sheet of a data set: one row per domain, one column per class or target quantile."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.data.dataset import DomainDataset, Listing, drawn_by_us, read_checked

_MOST = 12
"""Maximum number of domains and classes shown, the first ones."""
QUANTILES = ("lowest", "20 %", "40 %", "60 %", "80 %", "highest")
"""Columns for a regression: in each domain, the image whose target has this rank."""
_MARGIN = 4
LEFT, TOP = 96, 20
"""Margins for names, in pixels."""


def contact_sheet(dataset: DomainDataset, size: int = 96) -> bytes:
    """Draw the first image of each class in each domain, as PNG; a cell without one stays white.

    For a regression, each row goes from the domain's lowest target to its highest. Images that are
    not RGB bytes are shown by one or three channels, which the sheet names, stretched to their
    range. Images are decoded as for a run, to ``size`` pixels a side.

    Raises:
        DataError: If the data set is missing or incomplete, or an image cannot be decoded.
    """
    from PIL import Image, ImageDraw, ImageFont

    records = dataset.records()
    domains = dataset.domains[:_MOST]
    heads: Sequence[str] = dataset.classes[:_MOST] or QUANTILES
    note = _note(dataset)
    step = size + _MARGIN
    shape = LEFT + step * len(heads), TOP + step * len(domains) + (TOP if note else 0)
    sheet = Image.new("RGB", shape, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()

    def fitting(text: str, width: int) -> str:
        if draw.textlength(text, font) <= width:
            return text
        while text and draw.textlength(f"{text}..", font) > width:
            text = text[:-1]
        return f"{text}.."

    for column, name in enumerate(heads):
        place = (LEFT + step * column, _MARGIN)
        draw.text(place, fitting(_ascii(name), size), fill="black", font=font)
    for row, domain in enumerate(domains):
        place = (_MARGIN, TOP + step * row + size // 2 - 6)
        draw.text(place, fitting(_ascii(domain), LEFT - 2 * _MARGIN), fill="black", font=font)
        for column, index in enumerate(_chosen(dataset, records, row, len(heads))):
            if index is not None:
                image = read_checked(dataset, index, size)
                picture = Image.fromarray(shown_image(dataset, image))
                sheet.paste(picture, (LEFT + step * column, TOP + step * row))
    if note:
        place = (_MARGIN, TOP + step * len(domains) + _MARGIN)
        draw.text(place, fitting(note, shape[0] - 2 * _MARGIN), fill="black", font=font)
    file = BytesIO()
    sheet.save(file, format="PNG", pnginfo=drawn_by_us())
    return file.getvalue()


def _chosen(
    dataset: DomainDataset, records: Listing, domain: int, columns: int
) -> list[int | None]:
    """Return the image of each column in a domain's row, if it has one."""
    inside = np.flatnonzero(records.domains == domain)
    labels = records.labels[inside]
    if dataset.classes:
        firsts = (inside[labels == column] for column in range(columns))
        return [int(images[0]) if len(images) else None for images in firsts]
    if not len(inside):
        return [None] * columns
    places = np.linspace(0, len(inside) - 1, columns).round().astype(np.int64)
    ranked: list[int | None] = inside[np.argsort(labels, kind="stable")][places].tolist()
    return ranked


def shown_image(dataset: DomainDataset, image: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an image as RGB bytes, [size, size, 3]: unchanged, or with channels stretched."""
    if image.dtype == np.uint8 and image.shape[2] == 3:
        return image
    bands = image[:, :, _bands(dataset)].astype(np.float32)
    low, high = bands.min(axis=(0, 1)), bands.max(axis=(0, 1))
    spread = np.where(high > low, high - low, 1)
    stretched: NDArray[np.uint8] = np.rint((bands - low) / spread * 255).astype(np.uint8)
    return stretched


def _bands(dataset: DomainDataset) -> list[int]:
    """Return the channels that are shown as red, green and blue."""
    return [0, 0, 0] if dataset.channels < 3 else list(dataset.bands)


def _note(dataset: DomainDataset) -> str:
    """Return a note on how images that are not RGB bytes are shown, or an empty text."""
    if (dataset.channels, dataset.pixels) == (3, "uint8"):
        return ""
    shown = list(dict.fromkeys(band + 1 for band in _bands(dataset)))
    if len(shown) == 1:
        return f"channel 1 of {dataset.channels}, each image stretched to its range"
    named = ", ".join(map(str, shown))
    return (
        f"channels {named} of {dataset.channels} as red, green, blue, "
        f"each image stretched to its range"
    )


def _ascii(text: str) -> str:
    """Return text with only characters of the built-in font."""
    return text.encode("ascii", "replace").decode()
