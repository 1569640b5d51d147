"""Camelyon17-WILDS: tumour in patches of lymph nodes, one domain per hospital."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from feddg_bench.common.errors import DataError
from feddg_datasets.shared.tables import check_columns, matching, one_of, read_table, whole
from feddg_datasets.shared.wilds import IntArray, WildsDataset, column


class Camelyon17(WildsDataset):
    """Camelyon17-WILDS 1.0 (Bandi et al., 2018; Koh et al., ICML 2021).

    Patches of 96 x 96 pixels from 50 slides of five hospitals; the class says whether the middle
    32 x 32 pixels hold tumour. Hospitals 0, 3 and 4 train, 1 validates, 2 tests; there is no
    ``id_test``. Groups are slides.
    """

    name = "camelyon17"
    title = "Camelyon17"
    domains = tuple(f"hospital_{number}" for number in range(5))
    letters: ClassVar[Mapping[str, str]] = {domain: domain[-1] for domain in domains}
    classes = ("normal", "tumor")
    # CLIP's, for PatchCamelyon
    prompts: ClassVar[Mapping[str, str]] = {
        "normal": "this is a photo of lymph node",
        "tumor": "this is a photo of lymph node containing metastatic tumor tissue",
    }
    licence = "CC0-1.0"
    source = "https://wilds.stanford.edu/datasets/#camelyon17 (camelyon17_v1.0)"
    split_sizes: ClassVar[Mapping[str, int]] = {
        "train": 302_436,
        "id_val": 33_560,
        "val": 34_904,
        "test": 85_054,
    }
    archive_bytes = 10_658_709_504
    default_recipe = "ppdg"
    task = "classification"
    metrics = ("accuracy", "worst_group")
    groups = tuple(f"slide_{number:02d}" for number in range(50))
    module = "camelyon17_dataset"
    reader = "Camelyon17Dataset"
    release = "1.0"

    def check(self) -> None:
        """Check ``metadata.csv``."""
        columns = (
            matching("patient", "[0-9]{3}", "three digits such as 004, as in the names of files"),
            whole("node"),
            whole("x_coord"),
            whole("y_coord"),
            one_of("tumor", ("0", "1")),
            whole("slide", len(self.groups)),
            whole("center", len(self.domains)),
            one_of("split", ("0", "1")),
        )
        file = self.folder / "metadata.csv"
        table = read_table(file)
        check_columns(file, table, columns)
        first = table.columns[0]
        if first in {column.name for column in columns}:  # wilds reads it as row numbers
            raise DataError(
                f"{file} begins with the column {first!r}; expected a column of row numbers before "
                f"it"
            )

    def files(self, source: Any) -> Sequence[str]:
        """Return the patches' files."""
        files: Sequence[str] = source._input_array
        return files

    def domain_of(self, source: Any) -> IntArray:
        """Return the hospitals."""
        return column(source, "hospital").astype(np.int64)

    def group_of(self, source: Any) -> IntArray:
        """Return the slides."""
        return column(source, "slide").astype(np.int64)
