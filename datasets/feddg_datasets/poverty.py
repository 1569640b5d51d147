"""PovertyMap-WILDS: wealth from satellite images, two domains per country: rural and urban."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_datasets.shared.bands import resize_bands
from feddg_datasets.shared.tables import check_columns, matching, one_of, read_table
from feddg_datasets.shared.wilds import IntArray, WildsDataset, column, places, roles

COUNTRIES = {
    "angola": "ao",
    "benin": "bj",
    "burkina_faso": "bf",
    "cameroon": "cm",
    "cote_d_ivoire": "ci",
    "democratic_republic_of_congo": "cd",
    "ethiopia": "et",
    "ghana": "gh",
    "guinea": "gn",
    "kenya": "ke",
    "lesotho": "ls",
    "malawi": "mw",
    "mali": "ml",
    "mozambique": "mz",
    "nigeria": "ng",
    "rwanda": "rw",
    "senegal": "sn",
    "sierra_leone": "sl",
    "tanzania": "tz",
    "togo": "tg",
    "uganda": "ug",
    "zambia": "zm",
    "zimbabwe": "zw",
}
"""Names in the table, in the order of ``wilds``, and codes of ISO 3166."""
AREAS = ("rural", "urban")
FOLDS = "ABCDE"
BANDS = 8


class PovertyMap(WildsDataset):
    """PovertyMap-WILDS 1.1 (Yeh et al., 2020; Koh et al., ICML 2021).

    Satellite images of 224 x 224 pixels with eight bands, already normalised: blue, green, red, two
    of short-wave infrared, temperature, near infrared, night lights. The target is an index of
    wealth. Domains are the urban and the rural areas of 23 countries, groups are rural and urban.

    The authors publish five folds of the countries; each is a scenario of the protocol ``wilds``,
    ``fold-A`` to ``fold-E``, and results are means over them. Other protocols use fold A only.
    """

    name = "poverty"
    title = "PovertyMap"
    domains = tuple(f"{country}_{area}" for country in COUNTRIES for area in AREAS)
    letters: ClassVar[Mapping[str, str]] = {
        f"{country}_{area}": code + area[0] for country, code in COUNTRIES.items() for area in AREAS
    }
    classes = ()
    licence = "images: public domain (USA); survey data: terms of DHS"
    source = "https://wilds.stanford.edu/datasets/#povertymap (poverty_v1.1)"
    split_sizes: ClassVar[Mapping[str, int]] = {
        "train": 9_797,
        "id_val": 1_000,
        "id_test": 1_000,
        "val": 3_909,
        "test": 3_963,
    }
    """Sizes in fold A."""
    archive_bytes = 13_091_823_616
    measured_by_domain: ClassVar[bool] = False
    """A correlation is measured over all images of a split."""
    default_recipe = "ppdg"
    task = "regression"
    metrics = ("pearson", "worst_group")
    groups = AREAS
    channels = BANDS
    pixels = "float16"
    bands = (2, 1, 0)
    module = "poverty_dataset"
    reader = "PovertyMapDataset"
    release = "1.1"
    tables = ("dhs_metadata.csv",)

    def check(self) -> None:
        """Check ``dhs_metadata.csv``."""
        number = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
        columns = (
            one_of("country", tuple(COUNTRIES)),
            one_of("urban", ("True", "False", "TRUE", "FALSE", "1", "0", "1.0", "0.0")),
            matching("wealthpooled", number, "a number"),
        )
        file = self.folder / "dhs_metadata.csv"
        check_columns(file, read_table(file), columns)

    def files(self, source: Any) -> Sequence[str]:
        """Return the images' files, numbered as the rows of the table."""
        return [f"images/landsat_poverty_img_{number}.npz" for number in range(len(source))]

    def domain_of(self, source: Any) -> IntArray:
        """Return country and area."""
        country, area = (column(source, field).astype(np.int64) for field in ("country", "urban"))
        return country * len(AREAS) + area

    def group_of(self, source: Any) -> IntArray:
        """Return rural (0) or urban (1)."""
        return column(source, "urban").astype(np.int64)

    def scenario_splits(self, scenario: str) -> IntArray:
        """Return the position in `feddg_bench.data.splits.SPLITS` of every image in a fold."""
        return self._folds[scenario]

    @cached_property
    def official(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Domains by role in each fold."""
        return {fold: roles(self, splits) for fold, splits in self._folds.items()}

    @cached_property
    def _folds(self) -> dict[str, IntArray]:
        rows = self.wilds_rows
        return {f"fold-{fold}": places(self.open(fold=fold))[rows] for fold in FOLDS}

    def _facts(self) -> Iterator[NDArray[Any]]:
        yield from super()._facts()
        yield from self._folds.values()

    def read(self, index: int, size: int) -> NDArray[np.float16]:
        """Return image ``index`` as float16 [size, size, 8], resized bilinearly with antialiasing.

        Raises:
            DataError: If the file cannot be read, or does not hold the expected bands.
        """
        file = self.file(index)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                bands = arrays["x"]
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            what = " ".join(str(error).split())
            raise DataError(
                f"cannot decode the image {file} ({what}): expected an .npz file with an array x, "
                f"replace it with an intact copy"
            ) from error
        if bands.ndim != 3 or len(bands) != BANDS or bands.dtype.kind != "f":
            raise DataError(
                f"the image {file} holds {bands.dtype} {list(bands.shape)}; expected {BANDS} bands "
                f"of floating-point numbers, [{BANDS}, 224, 224]"
            )
        try:
            return resize_bands(bands, size)
        except ValueError as error:
            raise DataError(f"the image {file}: {error}; replace it with an intact copy") from error
