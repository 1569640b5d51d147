"""FMoW-WILDS: content of satellite images, one domain per year."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from feddg_datasets.shared.tables import check_columns, matching, one_of, read_table, time
from feddg_datasets.shared.wilds import IntArray, WildsDataset, column

FIRST_YEAR = 2002


class FMoW(WildsDataset):
    """FMoW-WILDS 1.1 (Christie et al., CVPR 2018; Koh et al., ICML 2021).

    Satellite images of 224 x 224 pixels, 62 kinds of buildings and land use, 16 years. Years 2002
    to 2012 train, 2013 to 2015 validate, 2016 and 2017 test; images of the last five years from
    another split of FMoW are in no split. Groups are the regions; images of countries that belong
    to none are in no group.
    """

    name = "fmow"
    title = "FMoW"
    domains = tuple(str(FIRST_YEAR + number) for number in range(16))
    letters: ClassVar[Mapping[str, str]] = {year: year for year in domains}
    # fmt: off
    classes = (
        "airport", "airport_hangar", "airport_terminal", "amusement_park", "aquaculture",
        "archaeological_site", "barn", "border_checkpoint", "burial_site", "car_dealership",
        "construction_site", "crop_field", "dam", "debris_or_rubble", "educational_institution",
        "electric_substation", "factory_or_powerplant", "fire_station", "flooded_road", "fountain",
        "gas_station", "golf_course", "ground_transportation_station", "helipad", "hospital",
        "impoverished_settlement", "interchange", "lake_or_pond", "lighthouse", "military_facility",
        "multi-unit_residential", "nuclear_powerplant", "office_building", "oil_or_gas_facility",
        "park", "parking_lot_or_garage", "place_of_worship", "police_station", "port", "prison",
        "race_track", "railway_bridge", "recreational_facility", "road_bridge", "runway",
        "shipyard", "shopping_mall", "single-unit_residential", "smokestack", "solar_farm",
        "space_facility", "stadium", "storage_tank", "surface_mine", "swimming_pool", "toll_booth",
        "tower", "tunnel_opening", "waste_disposal", "water_treatment_facility", "wind_farm", "zoo",
    )
    # fmt: on
    prompts: ClassVar[Mapping[str, str]] = {
        name: f"a satellite photo of a {name.replace('_', ' ')}" for name in classes
    }
    licence = "FMoW Challenge Public License"
    source = "https://wilds.stanford.edu/datasets/#fmow (fmow_v1.1)"
    split_sizes: ClassVar[Mapping[str, int]] = {
        "train": 76_863,
        "id_val": 11_483,
        "id_test": 11_327,
        "val": 19_915,
        "test": 22_108,
    }
    archive_bytes = 53_893_324_800
    default_recipe = "ppdg"
    task = "classification"
    metrics = ("accuracy", "worst_group")
    groups = ("Africa", "Americas", "Asia", "Europe", "Oceania")
    module = "fmow_dataset"
    reader = "FMoWDataset"
    release = "1.1"
    tables = ("rgb_metadata.csv", "country_code_mapping.csv")

    def check(self) -> None:
        """Check both tables."""
        columns = (
            one_of("split", ("train", "val", "test", "seq")),
            one_of("category", self.classes),
            matching("country_code", ".+", "the code of a country"),
            time(
                "timestamp",
                r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)",
                "ISO8601",
                "a time such as 2016-03-28T14:02:11Z",
            ),
        )
        file = self.folder / "rgb_metadata.csv"
        table = read_table(file)
        check_columns(file, table, columns)
        years = f"a time from {self.domains[0]} to {self.domains[-1]}"
        used = table[table["split"] != "seq"]
        check_columns(file, used, (matching("timestamp", "20(0[2-9]|1[0-7])-.*", years),))
        regions = (
            matching("alpha-3", ".+", "the code of a country"),
            matching("region", ".*", "the name of a region"),
        )
        file = self.folder / "country_code_mapping.csv"
        check_columns(file, read_table(file), regions)

    @contextmanager
    def amended(self, module: Any) -> Iterator[None]:
        """Let the class read its own times: some have fractions of a second, most have none.

        From version 2, pandas applies the format of the first time to all, and rejects the others.
        """
        pandas = module.pd
        read_time = partial(pandas.to_datetime, format="ISO8601")
        module.pd = SimpleNamespace(read_csv=pandas.read_csv, to_datetime=read_time)
        try:
            yield
        finally:
            module.pd = pandas

    def files(self, source: Any) -> Sequence[str]:
        """Return the images' files, numbered over all rows of the table."""
        return [f"images/rgb_img_{number}.png" for number in source.full_idxs]

    def domain_of(self, source: Any) -> IntArray:
        """Return the years."""
        return column(source, "year").astype(np.int64)

    def group_of(self, source: Any) -> IntArray:
        """Return the regions."""
        names = source.metadata_map["region"]
        position = [self.groups.index(name) if name in self.groups else -1 for name in names]
        return np.array(position, dtype=np.int64)[column(source, "region").astype(np.int64)]
