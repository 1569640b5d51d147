"""A client's batches: each image once, reproducible by name; and its learning rate."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.config.schema import AugmentSettings, TrainSettings
from feddg_bench.core.client import Client
from feddg_bench.data import client_images
from feddg_bench.data.augment import Augment
from feddg_bench.data.client_images import ClientImages, ImageBank
from feddg_bench.data.federated import Federation
from tests.helpers import PLAIN

COUNT, SIDE = 11, 8
UNCHANGED = AugmentSettings.model_validate(PLAIN["augment"])


def federation():
    """Return a federation whose images have their index as first pixel and as label."""
    images = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(COUNT)
    return Federation(images, SIDE, np.arange(COUNT), {}, (), COUNT)


def make_client(
    index=range(COUNT), *, name="client_0", round=1, augment=UNCHANGED, seed=0, **train
):
    settings = TrainSettings(**{"batch_size": 4, **train})
    bank = ImageBank(federation(), torch.device("cpu"))
    return Client(
        name=name,
        round=round,
        rounds=10,
        data=ClientImages(bank, np.array(index), augment, settings),
        weights={},
        broadcast={},
        memory={},
        fabric=SimpleNamespace(),
        train=settings,
        seed=seed,
    )


def labels(batches):
    return [batch[1].tolist() for batch in batches]


def domain_client(**train):
    """Return a client whose image ``i`` belongs to domain ``i % 3``."""
    client = make_client(augment=AugmentSettings(), **train)
    client.domain_ids = torch.arange(COUNT) % 3
    return client


def images(batches):
    return torch.cat([batch[0] for batch in batches])


# ------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("pixels", [np.uint8, np.float16])
def test_an_augmentation_that_changes_nothing_is_left_out(pixels, monkeypatch):
    """Batches have the bits and the memory layout that `Augment` would give them."""
    bank = ImageBank(federation(), torch.device("cpu"))
    bank.images = torch.from_numpy(federation().images.astype(pixels))
    given = {"train": True, "views": 2, "companions": torch.zeros(COUNT, SIDE, SIDE, 3).byte()}

    def batches():
        client = make_client()
        client.data = ClientImages(bank, np.arange(COUNT), UNCHANGED, client.train)
        return list(client.batches(**given))

    short = batches()
    monkeypatch.setattr(Augment, "nothing", False)
    for (images, numbers), (others, same) in zip(short, batches(), strict=True):
        assert torch.equal(images, others)
        assert images.stride() == others.stride()
        assert torch.equal(numbers, same)


@pytest.mark.parametrize("pixels", [np.uint8, np.float16])
@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("settings", [UNCHANGED, AugmentSettings(hue=0, grayscale=0)], ids=str)
def test_batches_share_no_memory_with_the_images(pixels, augment, settings):
    """Writing into a batch, of one image or of all, changes no stored image."""
    bank = ImageBank(federation(), torch.device("cpu"))
    bank.images = torch.from_numpy(federation().images.astype(pixels))
    before = bank.images.clone(), bank.labels.clone()
    for size in (1, COUNT):
        held = ClientImages(bank, np.arange(COUNT), settings, TrainSettings(batch_size=size))
        for views in (1, 2):
            client = make_client()
            client.data = held
            for pictures, numbers in client.batches(train=False, augment=augment, views=views):
                pictures.numpy().fill(0)
                numbers.data.zero_()
    assert torch.equal(bank.images, before[0])
    assert torch.equal(bank.labels, before[1])


def test_an_epoch_holds_every_image_once():
    drawn = labels(make_client([3, 1, 4, 5, 9, 2, 6]).batches(train=True))
    assert [len(part) for part in drawn] == [4, 3]
    assert sorted(chain(*drawn)) == [1, 2, 3, 4, 5, 6, 9]


def test_images_go_with_their_labels():
    for batch, label in make_client().batches(train=True):
        assert_close(batch[:, 0, 0, 0] * 255, label.float())


def test_without_training_images_come_in_order_and_as_stored():
    client = make_client([7, 2, 5], augment=AugmentSettings())
    ((batch, label),) = client.batches(train=False)
    assert label.tolist() == [7, 2, 5]
    stored = torch.from_numpy(federation().images[[7, 2, 5]])
    assert batch.shape == (3, 3, SIDE, SIDE)
    assert batch.dtype == torch.float32
    assert_close(batch, stored.permute(0, 3, 1, 2) / 255)


def test_the_same_epoch_is_the_same_however_often_it_is_asked_for():
    client = make_client(augment=AugmentSettings())
    first = list(client.batches(train=True, epoch=1))
    list(client.batches(train=True, epoch=0))
    torch.rand(5)
    again = list(client.batches(train=True, epoch=1))
    assert labels(first) == labels(again)
    assert torch.equal(images(first), images(again))


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_client().batches(train=True, epoch=1),
        lambda: make_client(round=2).batches(train=True),
        lambda: make_client(name="client_1").batches(train=True),
        lambda: make_client(seed=1).batches(train=True),
    ],
    ids=["epoch", "round", "client", "seed"],
)
def test_each_has_its_own_order(other):
    assert labels(other()) != labels(make_client().batches(train=True))


def test_augmentation_can_be_asked_for_without_shuffling():
    client = make_client(augment=AugmentSettings())
    ordered = list(client.batches(train=False, augment=True))
    assert list(chain(*labels(ordered))) == list(range(COUNT))
    plain = images(client.batches(train=False))
    changed = (images(ordered) != plain).flatten(1).any(1)
    assert changed.sum() >= COUNT - 1
    assert images(ordered).min() >= 0
    assert images(ordered).max() <= 1


def test_shuffling_can_be_asked_for_without_augmentation():
    client = make_client(augment=AugmentSettings())
    for batch, label in client.batches(train=True, augment=False):
        assert_close(batch[:, 0, 0, 0] * 255, label.float())


# -------------------------------------------------------------------------------- domains


@pytest.mark.parametrize("given", [{}, {"parts": [torch.tensor([4, 4, 9]), torch.tensor([0])]}])
def test_batches_with_domains_are_the_same_batches(given):
    client = domain_client()
    plain = list(client.batches(train=True, **given))
    named = list(client.batches(train=True, domains=True, **given))
    for (some_images, some_labels), (same_images, same_labels, ids) in zip(
        plain, named, strict=True
    ):
        assert torch.equal(some_images, same_images)
        assert torch.equal(some_labels, same_labels)
        assert ids.tolist() == [label % 3 for label in some_labels.tolist()]
        assert ids.dtype == torch.int64


def test_domains_of_batches_without_a_last_single_image():
    client = domain_client(batch_size=5, drop_last_if_single=True)
    found = list(client.batches(train=True, domains=True, views=2))
    assert [len(ids) for _, _, ids in found] == [5, 5]
    assert all(torch.equal(ids, labels % 3) for _, labels, ids in found)


# ------------------------------------------------------------------------- the last batch


def test_a_last_batch_of_one_is_kept_by_default():
    assert [len(part) for part in labels(make_client(range(9)).batches(train=True))] == [4, 4, 1]


def test_a_last_batch_of_one_can_be_left_out():
    client = make_client(range(9), drop_last_if_single=True)
    assert [len(part) for part in labels(client.batches(train=True))] == [4, 4]
    assert [len(part) for part in labels(client.batches(train=False))] == [4, 4, 1]


def test_a_last_batch_of_two_stays():
    client = make_client(range(6), drop_last_if_single=True)
    assert [len(part) for part in labels(client.batches(train=True))] == [4, 2]


def test_a_client_with_one_image_still_trains():
    client = make_client([5], drop_last_if_single=True)
    assert labels(client.batches(train=True)) == [[5]]


def test_batches_of_one_are_left_alone():
    client = make_client(range(3), batch_size=1)
    assert [len(part) for part in labels(client.batches(train=True))] == [1, 1, 1]


# ----------------------------------------------------------------------- views, companions


def test_views_are_augmented_independently():
    client = make_client(augment=UNCHANGED.model_copy(update={"flip": 0.5}))
    batch, label = next(iter(client.batches(train=True, views=3)))
    assert batch.shape == (3, 4, 3, SIDE, SIDE)
    stored = torch.from_numpy(federation().images[label.numpy()]).permute(0, 3, 1, 2) / 255
    patterns = []
    for view in batch:
        kept = [torch.equal(a, b) for a, b in zip(view, stored, strict=True)]
        mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(view, stored, strict=True)]
        assert all(k or m for k, m in zip(kept, mirrored, strict=True))
        patterns.append(tuple(kept))
    assert len(set(patterns)) > 1


def test_companions_are_augmented_as_the_images_they_accompany():
    client = make_client(augment=AugmentSettings())
    own = torch.from_numpy(federation().images)
    drawn = list(client.batches(train=True, companions=own))
    assert len(drawn) == 3
    for batch, label in drawn:
        assert batch.shape[:2] == (2, len(label))
        assert torch.equal(batch[0], batch[1])


def test_companions_follow_their_image_through_the_shuffle():
    index = [3, 1, 4, 5, 9, 2, 6]
    companions = torch.zeros(len(index), SIDE, SIDE, 3, dtype=torch.uint8)
    companions[:, 0, 0, 1] = torch.tensor(index)
    for batch, label in make_client(index).batches(train=True, companions=companions):
        assert_close(batch[1][:, 1, 0, 0] * 255, label.float())
        assert_close(batch[0][:, 0, 0, 0] * 255, label.float())


def test_images_are_the_same_with_and_without_companions():
    """Compare the first batch only, before later batches draw."""
    client = make_client(augment=AugmentSettings())
    alone = next(iter(client.batches(train=True)))
    beside = next(
        iter(client.batches(train=True, companions=torch.from_numpy(federation().images)))
    )
    assert torch.equal(alone[0], beside[0][0])


# --------------------------------------------------------------------------- the image bank


def test_a_file_of_images_is_read_as_the_array(tmp_path):
    array = federation()
    path = tmp_path / "images"
    path.write_bytes(array.images.tobytes())
    banks = [ImageBank(f, torch.device("cpu")) for f in (array, replace(array, images=path))]
    index = torch.tensor([10, 0, 3])
    (expected, labels_), (found, found_labels) = (bank.take(index) for bank in banks)
    assert torch.equal(found, expected)
    assert torch.equal(found_labels, labels_)
    assert found.dtype == torch.uint8


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is resident")
@pytest.mark.parametrize("read", ["take", "look"])
def test_images_that_were_read_do_not_stay_in_the_memory_of_the_process(
    tmp_path, monkeypatch, read
):
    count, side, most = 64, 128, 2**20
    monkeypatch.setattr(client_images, "MAPPED", most)
    images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    path = tmp_path / "images"
    path.write_bytes(images.tobytes())
    bank = ImageBank(Federation(path, side, np.arange(count), {}, (), 1), torch.device("cpu"))
    for index in torch.arange(count).split(4):
        pixels, _ = getattr(bank, read)(index)
        assert np.array_equal(torch.cat([*pixels]).reshape(-1, side, side, 3), images[index])
    assert resident(path) < most < images.nbytes


def resident(path):
    """Return the resident bytes of a mapped file in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    kib = [
        int(next(line for line in lines if line.startswith("Rss:")).split()[1])
        for head in lines
        if head.endswith(str(path))
    ]
    return 1024 * sum(kib)


# -------------------------------------------------------------------- the rest of a client


def test_generators_are_the_clients_own():
    draws = {
        torch.rand(1, generator=client.generator(*names)).item()
        for client in (make_client(), make_client(name="client_1"), make_client(round=2))
        for names in (("negatives",), ("loader", 0), ("loader", 1))
    }
    assert len(draws) == 9
    first, again = (torch.rand(3, generator=make_client().generator("a")) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("round", "epochs", "epoch", "factor"),
    [
        (1, 1, 0, 1.0),
        (6, 1, 0, 0.5),
        (1, 2, 0, 1.0),
        (3, 4, 2, 0.8535533906),
        (10, 2, 1, 0.0061558),
    ],
)
def test_cosine_over_all_local_epochs_of_the_run(round, epochs, epoch, factor):
    """(1 + cos(pi done / total)) / 2, with 10 rounds in total."""
    client = make_client(round=round, schedule="cosine", local_epochs=epochs)
    assert client.lr_factor(epoch) == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize(
    ("round", "epochs", "epoch", "factor"),
    [(1, 1, 0, 1.0), (2, 1, 0, 0.9), (1, 3, 2, 0.81), (3, 2, 1, 0.59049)],
)
def test_exponential_over_the_local_epochs_done(round, epochs, epoch, factor):
    """0.9 to the power of the local epochs done in earlier rounds and in this one."""
    client = make_client(round=round, schedule="exponential", decay=0.9, local_epochs=epochs)
    assert client.lr_factor(epoch) == pytest.approx(factor, abs=1e-12)


def test_a_constant_learning_rate():
    assert {make_client(round=r).lr_factor(e) for r in (1, 5, 10) for e in (0, 3)} == {1.0}


def test_logged_numbers_become_weighted_means():
    client = make_client()
    client.log("loss", 1.0, 8)
    client.log("loss", torch.tensor(4.0), 4)
    client.log("hits", 3)
    assert client.metrics() == {"loss": 2.0, "hits": 3.0}
    assert all(type(value) is float for value in client.metrics().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_logged_together_have_the_bits_of_those_logged_in_turn(dtype):
    draw = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 50):
        values = [*torch.rand(count, generator=draw, dtype=dtype)]
        sizes = torch.randint(1, 200, (count,), generator=draw).tolist()
        together, in_turn = make_client(), make_client()
        for client in (together, in_turn):
            client.log("loss", values[0], 3)
        together.log_all("loss", values, sizes)
        for value, size in zip(values, sizes, strict=True):
            in_turn.log("loss", value, size)
        assert together.metrics() == in_turn.metrics()
    empty = make_client()
    empty.log_all("loss", [], [])
    assert empty.metrics() == {}


def test_two_clients_do_not_share_their_logs():
    first, second = make_client(), make_client()
    first.log("loss", 1.0)
    assert second.metrics() == {}
