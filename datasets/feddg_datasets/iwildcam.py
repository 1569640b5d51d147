"""iWildCam2020-WILDS: animals in camera traps, one domain per location."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from feddg_bench.common.errors import DataError
from feddg_bench.data.splits import SPLITS
from feddg_datasets.shared.tables import check_columns, matching, one_of, read_table, time, whole
from feddg_datasets.shared.wilds import IntArray, WildsDataset, column


class IWildCam(WildsDataset):
    """iWildCam2020-WILDS 2.0 (Beery et al., 2020; Koh et al., ICML 2021).

    203,029 images of 323 camera traps, 182 classes. Images of 243 locations train, other images of
    the same locations are ``id_val`` and ``id_test``, 32 locations validate and 48 test. Classes
    are named as in ``categories.csv`` if it lies next to ``metadata.csv``. Grey images become RGB,
    unlike in ``wilds``.
    """

    name = "iwildcam"
    title = "iWildCam"
    domains = tuple(f"location_{number:03d}" for number in range(323))
    letters: ClassVar[Mapping[str, str]] = {domain: str(int(domain[9:])) for domain in domains}
    classes = tuple(f"class_{number:03d}" for number in range(182))
    prompts: ClassVar[Mapping[str, str]] = {"empty": "a photo of a landscape without animals"}
    licence = "CDLA-Permissive-1.0"
    source = "https://wilds.stanford.edu/datasets/#iwildcam (iwildcam_v2.0)"
    split_sizes: ClassVar[Mapping[str, int]] = {
        "train": 129_809,
        "id_val": 7_314,
        "id_test": 8_154,
        "val": 14_961,
        "test": 42_791,
    }
    archive_bytes = 11_957_420_032
    measured_by_domain: ClassVar[bool] = False
    """A location may have only a few images and classes."""
    default_recipe = "pardon"
    task = "classification"
    metrics = ("macro_f1", "accuracy")
    module = "iwildcam_dataset"
    reader = "IWildCamDataset"
    release = "2.0"

    def __init__(self, data_root: Path | None = None) -> None:
        super().__init__(data_root)
        names = self._names()
        if names is not None:
            vars(self)["classes"] = names

    def check(self) -> None:
        """Check ``metadata.csv``."""
        columns = (
            one_of("split", SPLITS),
            matching("filename", r"[^/\\]+\.[A-Za-z]+", "the name of an image file"),
            whole("y", len(self.classes), without_gaps=True),
            whole("location_remapped", len(self.domains), without_gaps=True),
            whole("sequence_remapped", without_gaps=True),
            time(
                "datetime",
                r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{1,6}",
                "%Y-%m-%d %H:%M:%S.%f",
                "a time such as 2013-06-05 05:44:19.000",
            ),
        )
        file = self.folder / "metadata.csv"
        check_columns(file, read_table(file), columns)

    def files(self, source: Any) -> Sequence[str]:
        """Return the images' files, which all lie in ``train``."""
        return [f"train/{name}" for name in source._input_array]

    def domain_of(self, source: Any) -> IntArray:
        """Return the locations."""
        return column(source, "location").astype(np.int64)

    def _names(self) -> tuple[str, ...] | None:
        """Return the classes' names in ``categories.csv``, if it has one for each."""
        try:
            with (self.folder / "categories.csv").open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file))
        except (DataError, OSError, UnicodeDecodeError, csv.Error):
            return None
        names = {row.get("y"): row.get("name") for row in rows}
        ordered = [names.get(str(label)) for label in range(len(type(self).classes))]
        whole_list = all(ordered) and len(set(ordered)) == len(ordered)
        return tuple(str(name) for name in ordered) if whole_list else None
