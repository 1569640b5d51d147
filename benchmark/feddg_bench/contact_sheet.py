"""A picture of a data set: domains down, classes across."""

from __future__ import annotations

from io import BytesIO

import numpy as np

from feddg_bench.data import DomainDataset

MOST = 12
"""Domains and classes shown, the first ones."""
MARGIN = 4
LEFT, TOP = 96, 20
"""Pixels for names."""


def contact_sheet(dataset: DomainDataset, size: int = 96) -> bytes:
    """Draw the first image of each class in each domain, as PNG; a cell without one stays white.

    Args:
        dataset: What to draw; images are decoded as for a run.
        size: Pixels a side of an image.

    Raises:
        DataError: If the data set is not here or not whole, or an image cannot be decoded.
    """
    from PIL import Image, ImageDraw, ImageFont

    records = dataset.records()
    domains, classes = dataset.domains[:MOST], dataset.classes[:MOST]
    step = size + MARGIN
    sheet = Image.new("RGB", (LEFT + step * len(classes), TOP + step * len(domains)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()

    def fitting(text: str, width: int) -> str:
        if draw.textlength(text, font) <= width:
            return text
        while text and draw.textlength(f"{text}..", font) > width:
            text = text[:-1]
        return f"{text}.."

    for column, name in enumerate(classes):
        place = (LEFT + step * column, MARGIN)
        draw.text(place, fitting(_ascii(name), size), fill="black", font=font)
    for row, domain in enumerate(domains):
        place = (MARGIN, TOP + step * row + size // 2 - 6)
        draw.text(place, fitting(_ascii(domain), LEFT - 2 * MARGIN), fill="black", font=font)
        for column in range(len(classes)):
            chosen = np.flatnonzero((records.domains == row) & (records.labels == column))
            if len(chosen):
                picture = Image.fromarray(dataset.read(int(chosen[0]), size))
                sheet.paste(picture, (LEFT + step * column, TOP + step * row))
    file = BytesIO()
    sheet.save(file, format="PNG")
    return file.getvalue()


def _ascii(text: str) -> str:
    """Return text that the built-in font has all letters of."""
    return text.encode("ascii", "replace").decode()
