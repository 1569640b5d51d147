"""Who holds which image: the same function serves plans and runs, and reads no image."""

from __future__ import annotations

import numpy as np
import pytest

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.schema import DataSettings, FederationSettings, PartitionSettings
from feddg_bench.config.schema import RunSettings as Settings
from feddg_bench.data.dataset import Records
from feddg_bench.data.federated import count_images, make_federation, measured_parts, spread
from feddg_bench.data.protocols import scenarios
from feddg_datasets.digits4 import Digits4


class Unread(Digits4):
    """Digits4 whose images must not be drawn."""

    def read(self, *_):
        raise AssertionError


def settings(**sections) -> Settings:
    values = {"partition": PartitionSettings(clients=6), "federation": FederationSettings()}
    values["federation"] = FederationSettings(per_round=3)
    return Settings(method="fedavg", scenario="ip-o-c", **(values | sections))


def role(dataset, name="ip-o-c"):
    return scenarios("ltdo", dataset.domains, dataset.letters, name)[0]


@pytest.fixture
def dataset():
    return Unread()


@pytest.mark.parametrize("validation", [False, True])
def test_every_image_has_one_place(dataset, validation):
    parts = spread(settings(), dataset, role(dataset), validation=validation)
    held = [index for name, index in parts.splits.items() if name != "train"]
    held += parts.clients.values()
    assert sorted(np.concatenate(held)) == list(range(1797))
    assert bool(parts.validation) == validation
    assert set(parts.validation) in (set(), set(parts.clients))


def test_counts_and_federation_agree(dataset):
    records = dataset.records()
    parts = spread(settings(), dataset, role(dataset))
    counts = count_images(parts.splits, dataset)
    assert {name: sorted(by) for name, by in counts.items()} == {
        "train": ["ink", "poster"],
        "id_val": ["ink", "poster"],
        "id_test": ["ink", "poster"],
        "val": ["outline"],
        "test": ["chalk"],
    }
    for split, domain, index in measured_parts(parts.splits, dataset):
        assert counts[split][domain] == len(index)
        assert {dataset.domains[d] for d in records.domains[index]} == {domain}
    made = make_federation(np.empty(0), 16, dataset, role(dataset), parts)
    assert [part[:2] for part in made.evaluation] == [
        (split, domain) for split, by in counts.items() if split != "train" for domain in by
    ]
    assert made.num_classes == 10
    assert made.sources == ("ink", "poster")
    names = {"ink": 0, "poster": 1, "outline": -1, "chalk": -1}
    expected = [names[dataset.domains[d]] for d in records.domains]
    assert made.domain_ids.tolist() == expected


def test_small_domains_are_measured_together(dataset, monkeypatch):
    monkeypatch.setattr(Unread, "measured_by_domain", False)
    parts = spread(settings(), dataset, role(dataset))
    found = list(measured_parts(parts.splits, dataset))
    assert [(split, domain) for split, domain, _ in found] == [(s, "all") for s in parts.splits]
    assert all(index is parts.splits[split] for split, _, index in found)


class Lacking(Unread):
    """Has images of a class in held-out domains only."""

    def scan(self) -> Records:
        records = super().scan()
        gone = (records.labels == 7) & (records.domains < 2)
        return Records(records.paths, np.where(gone, 1, records.labels), records.domains)


def test_what_cannot_train_is_refused_before_an_image_is_read(dataset):
    def refused(error, word, dataset=dataset, **sections):
        with pytest.raises(error, match=word):
            spread(settings(**sections), dataset, role(dataset))

    refused(SettingsError, "clients", partition=PartitionSettings(clients=2000))
    few = PartitionSettings(kind="domain")
    refused(SettingsError, "per_round", partition=few)
    refused(DataError, "class 7", dataset=Lacking())
    refused(DataError, "split file", data=DataSettings(split_csv="absent.csv"))
