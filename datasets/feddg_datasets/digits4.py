"""Digits4: 1,797 handwritten digits in four visual domains, embedded, for first runs and tests."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from feddg_bench.data import DomainDataset, Records
from feddg_bench.streams import derive_seed

Plane = NDArray[np.float64]
"""[32, 32], values in [0, 1] unless said otherwise."""
Picture = NDArray[np.float64]
"""[32, 32, 3], RGB in [0, 1]."""

SIDE = 32


class Digits4(DomainDataset):
    """The digits of scikit-learn (Alpaydin and Kaynak, UCI 1998), 8 x 8 grey, drawn in four ways.

    1,797 images of 32 x 32 pixels, RGB, ten classes, CC BY 4.0. Every digit is in one domain, each
    domain has a quarter of every class:

    - ``ink``: dark ink on cream paper;
    - ``poster``: a flat colour, lighter or darker, on a pattern of two colours;
    - ``outline``: a pencil line around the stroke, on ruled paper;
    - ``chalk``: blurred and patchy pastel chalk on a dark board.

    Drawing uses additions, multiplications, divisions and square roots only, in a fixed order,
    and PCG64's uniform numbers, so that every machine draws the same pixels.
    """

    name = "digits4"
    title = "Digits4"
    domains = ("ink", "poster", "outline", "chalk")
    letters = {"ink": "i", "poster": "p", "outline": "o", "chalk": "c"}
    classes = tuple("0123456789")
    licence = "CC BY 4.0"
    source = "scikit-learn, sklearn.datasets.load_digits"
    default_recipe = "quick"

