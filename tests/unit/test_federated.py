"""Assignment of images to clients: one function for plans and runs, which reads no image."""

from __future__ import annotations

import numpy as np
import pytest

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.schema import (
    DataSettings,
    EvaluationSettings,
    FederationSettings,
    PartitionSettings,
)
from feddg_bench.config.schema import RunSettings as Settings
from feddg_bench.data.dataset import Listing
from feddg_bench.data.federated import count_images, make_federation, measured_parts, spread
from feddg_bench.data.partition import heterogeneous_indices
from feddg_bench.data.protocols import scenarios
from feddg_bench.runs.request import Request
from feddg_datasets.digits4 import Digits4
from feddg_datasets.pacs import PACS
from tests.helpers import refused


class Unread(Digits4):
    """Digits4 whose images must not be read."""

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


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize(("share", "unseen"), [(0.2, 0), (0.0, 2), (0.25, 3)])
def test_images_of_clients_have_one_place(dataset, validation, share, unseen):
    asked = settings(
        data=DataSettings(client_test_fraction=share),
        federation=FederationSettings(per_round=3, unseen_clients=unseen),
    )
    plain = spread(settings(), dataset, role(dataset))
    parts, again = (spread(asked, dataset, role(dataset), validation=validation) for _ in range(2))
    apart = [index for held in parts.of_clients.values() for index in held.values()]
    held = [index for name, index in parts.splits.items() if name != "train"]
    assert sorted(np.concatenate([*held, *apart, *parts.clients.values()])) == list(range(1797))
    assert str(parts) == str(again)
    tests, never = (parts.of_clients.get(s, {}) for s in ("client_test", "unseen_clients"))
    assert len(never) == unseen
    assert {*parts.clients, *never} == {*plain.clients}
    assert {*parts.clients} == {*tests} if share else not tests
    for name, index in plain.clients.items():
        if name in never:
            assert never[name].tolist() == index.tolist()
        elif share:
            assert len(tests[name]) == round(share * len(index))
            assert set(tests[name]) < set(index)
    if not validation:  # else clients without validation images give up some
        train = sorted(np.concatenate([*parts.clients.values()]))
        assert parts.splits["train"].tolist() == train
    assert parts.partition.digest() == plain.partition.digest()


def test_a_client_keeps_an_image_to_train_and_one_to_test(dataset):
    many = settings(
        data=DataSettings(client_test_fraction=0.01),
        partition=PartitionSettings(clients=400, heterogeneity=0),
    )
    parts = spread(many, dataset, role(dataset))
    assert {len(index) for index in parts.of_clients["client_test"].values()} == {1}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"unseen_clients": 6},
            "federation.unseen_clients is 6, but of the clients that hold images (6)",
        ),
        ({"unseen_clients": 4}, "federation.per_round is 3, more than the clients that train (2)"),
        (
            {"unseen_clients": 5, "per_round": 1},
            "is left with federation.unseen_clients=5: lower it",
        ),
    ],
)
def test_too_few_clients_are_left_to_train(dataset, values, words):
    asked = settings(
        partition=PartitionSettings(clients=6, heterogeneity=0),
        federation=FederationSettings(**{"per_round": 3} | values),
    )
    with refused(SettingsError, words):
        spread(asked, dataset, role(dataset))


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


def test_only_the_splits_that_are_named_are_measured(dataset):
    chosen = settings(evaluation=EvaluationSettings(splits=("val", "id_val")))
    parts = spread(chosen, dataset, role(dataset))
    made = make_federation(np.empty(0), 16, dataset, role(dataset), parts, ("val", "id_val"))
    measured = [part[:2] for part in made.evaluation]
    assert measured == [("id_val", "ink"), ("id_val", "poster"), ("val", "outline")]


def test_a_split_without_images_cannot_be_measured(dataset):
    none, wanted = DataSettings(id_test_fraction=0), EvaluationSettings(splits=("id_test",))
    with refused(SettingsError, "evaluation.splits names id_test", "there are: id_val, val, test"):
        spread(settings(data=none, evaluation=wanted), dataset, role(dataset))


def test_a_regression_has_no_probabilities(dataset, monkeypatch):
    monkeypatch.setattr(Unread, "task", "regression")
    asked = settings(evaluation=EvaluationSettings(metrics=("ece",)))
    with refused(SettingsError, "evaluation.metrics names ece, but Digits4 is a regression"):
        spread(asked, dataset, role(dataset))


def test_small_domains_are_measured_together(dataset, monkeypatch):
    monkeypatch.setattr(Unread, "measured_by_domain", False)
    parts = spread(settings(), dataset, role(dataset))
    found = list(measured_parts(parts.splits, dataset))
    assert [(split, domain) for split, domain, _ in found] == [(s, "all") for s in parts.splits]
    assert all(index is parts.splits[split] for split, _, index in found)


class Lacking(Unread):
    """Has images of one class in held-out domains only."""

    def scan(self) -> Listing:
        records = super().scan()
        gone = (records.labels == 7) & (records.domains < 2)
        return Listing(records.paths, np.where(gone, 1, records.labels), records.domains)


def test_what_cannot_train_is_refused_before_an_image_is_read(dataset):
    def refused(error, word, dataset=dataset, **sections):
        with pytest.raises(error, match=word):
            spread(settings(**sections), dataset, role(dataset))

    refused(SettingsError, "clients", partition=PartitionSettings(clients=2000))
    few = PartitionSettings(kind="domain")
    refused(SettingsError, "per_round", partition=few)
    refused(DataError, "class 7", dataset=Lacking())
    refused(DataError, "cannot read absent.csv", data=DataSettings(split_csv="absent.csv"))


# ------------------------------------------------------------ the clients of FedDG_Benchmark


class Renumbered(Unread):
    """Digits4 with other domain ids in FedDG_Benchmark, like PACS."""

    reference_domains = ("chalk", "outline", "poster", "ink")


def test_reference_rounding_deals_domains_by_their_reference_ids():
    dataset = Renumbered()
    records = dataset.records()
    reference = PartitionSettings(clients=7, rounding="reference", seed=1001)
    parts = spread(settings(partition=reference, seed=5), dataset, role(dataset))
    train = parts.splits["train"]
    ids = np.array([3, 2, 1, 0])[records.domains[train]]
    expected = heterogeneous_indices(ids, 7, 0.1, seed=1001, rounding="reference")
    assert [index.tolist() for index in parts.partition.indices] == [
        train[index].tolist() for index in expected
    ]
    plain = spread(settings(partition=reference, seed=5), Unread(), role(dataset))
    assert plain.partition.sizes.tolist() != parts.partition.sizes.tolist()
    ours = reference.model_copy(update={"rounding": "largest_remainder"})
    same = [
        spread(settings(partition=ours), kind(), role(dataset)) for kind in (Unread, Renumbered)
    ]
    assert same[0].partition.digest() == same[1].partition.digest()


def test_pacs_has_the_ids_of_the_published_split_files():
    assert PACS.reference_domains == ("photo", "art_painting", "cartoon", "sketch")
    assert set(PACS.reference_domains) == set(PACS.domains)


def test_reference_rounding_deals_images_in_the_order_of_the_split_file(dataset, tmp_path):
    records = dataset.records()
    roles = {"ink": "train", "poster": "train", "outline": "val", "chalk": "test"}
    order = np.random.default_rng(0).permutation(1797)
    lines = [
        f"{roles[dataset.domains[records.domains[i]]]},{dataset.domains[records.domains[i]]},"
        f"{records.paths[i]}"
        for i in order
    ]
    path = tmp_path / "ip-o-c.csv"
    path.write_text("\n".join(["split,domain,path", *lines]))
    data = DataSettings(split_csv=str(path))
    reference = PartitionSettings(clients=5, rounding="reference", seed=3)
    parts = spread(settings(data=data, partition=reference), dataset, role(dataset))
    train = order[np.isin(records.domains[order], [0, 1])]
    expected = heterogeneous_indices(records.domains[train], 5, 0.1, seed=3, rounding="reference")
    assert [index.tolist() for index in parts.partition.indices] == [
        train[index].tolist() for index in expected
    ]
    ours = reference.model_copy(update={"rounding": "largest_remainder"})
    parts = spread(settings(data=data, partition=ours), dataset, role(dataset))
    assert (np.diff(parts.splits["train"]) > 0).all()


def test_a_seed_of_the_partition_alone_is_in_the_key_only_when_given(dataset):
    def planned(**partition):
        values = {"partition": {"clients": 6, **partition}, "federation": {"per_round": 3}}
        (plan,) = Request(scenario="ip-o-c", settings=values, seeds=[4]).plan(check=False)
        return plan

    plain, given = planned(), planned(seed=1001)
    assert planned(seed=None).key == plain.key != given.key
    assert "seed" not in plain.canonical["partition"]
    digests = {
        spread(plan.settings, dataset, plan.scenario).partition.digest()
        for plan in (given, planned(seed=1001), plain)
    }
    assert len(digests) == 2


def test_one_call_takes_a_folder_of_split_files(dataset, tmp_path):
    records = dataset.records()
    roles = ("train", "train", "val", "test")
    for name, domains in {"ip-o-c": "ipoc", "po-c-i": "poci"}.items():
        codes = dict(zip(domains, roles, strict=True))
        rows = [
            f"{codes[dataset.domains[d][0]]},{dataset.domains[d]},{path}"
            for path, d in zip(records.paths, records.domains, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["split,domain,path", *rows]))

    def plans(path, **named):
        values = {"data": {"split_csv": str(path)}, "partition": {"clients": 20}}
        return Request(settings=values, **named).plan(check=False)

    both = plans(tmp_path)
    assert {plan.settings.scenario for plan in both} == {"ip-o-c", "po-c-i"}
    for plan in both:
        (alone,) = plans(tmp_path / f"{plan.settings.scenario}.csv")
        assert alone.key == plan.key
        spread(plan.settings, dataset, plan.scenario)
    with refused(SettingsError, "io-c-p"):
        plans(tmp_path, scenario="io-c-p")
    with refused(SettingsError, "id_val_fraction"):
        Request(settings={"data": {"split_csv": "x", "id_val_fraction": 0.1}}).plan()
