"""Every method can be trained, tested, saved and loaded without a federation."""

from __future__ import annotations

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader, TensorDataset

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.engine.construction import build_method
from tests.helpers import bitwise, methods_apart, refused

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def loader(labels=None):
    torch.manual_seed(3)
    images = torch.rand(20, 3, 16, 16)
    labels = torch.arange(20) % 3 if labels is None else labels
    images += labels.float()[:, None, None, None]
    return DataLoader(TensorDataset(images / images.max(), labels), batch_size=8)


def trainer(folder, **settings):
    return Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


TRAINED = ("build", "configure_optimizers", "features", "forward", "training_step", "needs_text")
"""Members that matter under a Trainer; a method with none of its own is there as FedAvg is."""


@pytest.mark.parametrize("name", methods_apart(TRAINED))
def test_it_trains_and_comes_back_without_a_federation(name, tmp_path):
    method = build_method(name, num_classes=3, lr=0.01)
    before = {n: p.detach().clone() for n, p in method.named_parameters()}
    training = trainer(tmp_path, max_steps=-1)
    training.fit(method, loader(), loader())
    assert 0 < training.logged_metrics["train_loss"] < 30
    moved = {n for n, p in method.named_parameters() if not torch.equal(p, before[n])}
    usual = {"classifier.bias", "backbone.net.0.weight"}
    own = {
        "fedclip": {"attention.0.weight"},
        "zeroshot": set(),
        "fdse": {"classifier.bias", "backbone.net.0.dfe.weight"},
    }
    usual = own.get(name, usual)
    assert usual <= moved | {n.replace("classifier.2", "classifier") for n in moved}

    (measured,) = training.test(method, loader(), verbose=False)
    assert set(measured) == {"test_loss", "test_accuracy"}
    assert training.validate(method, loader(), verbose=False)[0] == {
        "val_loss": measured["test_loss"],
        "val_accuracy": measured["test_accuracy"],
    }
    assert round(20 * measured["test_accuracy"], 4) in range(21)  # over images, not over batches

    path = tmp_path / "model.ckpt"
    training.save_checkpoint(path)
    back = type(method).load_from_checkpoint(path, weights_only=True)
    bitwise(back.state_dict(), method.state_dict())
    assert back.hparams == method.hparams
    assert back.settings == method.settings
    images = torch.rand(4, 3, 16, 16)
    bitwise(back.eval()(images), method.eval()(images))


def test_a_regression_logs_its_correlation(tmp_path):
    method = build_method("fedavg", num_classes=1, task="regression")
    training = trainer(tmp_path)
    targets = torch.linspace(-1, 1, 20)
    training.fit(method, loader(targets), loader(targets))
    (measured,) = training.test(method, loader(targets), verbose=False)
    assert set(measured) == {"test_loss", "test_pearson"}


def test_settings_reach_the_part_they_belong_to():
    method = build_method("fedprox", num_classes=7, backbone="lenet", mu=0.5, lr=0.3, projection=9)
    assert (method.settings.mu, method.train_settings.lr) == (0.5, 0.3)
    assert method.classifier.weight.shape == (7, 9)
    assert build_method("fedbn", num_classes=2).hparams["bn"] == "local"  # as it requires


def test_the_seed_decides_the_initial_weights():
    first, again, other = (build_method("fedavg", num_classes=2, seed=s) for s in (0, 0, 1))
    bitwise(first.state_dict(), again.state_dict())
    assert not torch.equal(first.classifier.weight, other.classifier.weight)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("fedavgg", {}, "did you mean 'fedavg'"),
        ("fedprox", {"muu": 1}, "did you mean 'mu'"),
        ("fedprox", {"mu": -1}, r"hyper\.mu"),
        ("pardon", {"style": "vgg19"}, "style_weights"),
        ("pardon", {"gama": 1}, "unknown pardon setting 'gama'.*triplet_weight"),
        ("fedsr", {"task": "regression"}, "cannot learn a regression"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_sentence(name, values, words):
    with pytest.raises(SettingsError, match=words):
        build_method(name, num_classes=2, **values)


def test_a_trainer_predicts_batches_with_and_without_labels(tmp_path):
    method = build_method("pardon", num_classes=3)
    some = loader()
    images = some.dataset.tensors[0]
    outputs = method.eval()(images)
    found = trainer(tmp_path).predict(method, some)
    bitwise(torch.cat([part.labels for part in found]), outputs.argmax(1))
    shares = torch.cat([part.probabilities for part in found])
    torch.testing.assert_close(shares, outputs.softmax(1))
    bare = trainer(tmp_path).predict(method, DataLoader(images, batch_size=8))
    bitwise(torch.cat([part.probabilities for part in bare]), shares)
    direct = method.train().predict(images)
    bitwise(direct.labels, outputs.argmax(1))
    assert method.training


def test_a_regression_predicts_numbers():
    method = build_method("fedavg", num_classes=1, task="regression")
    images = torch.rand(2, 3, 16, 16)
    found = method.predict(images)
    bitwise(found.labels, method.eval()(images).squeeze(1).detach())
    assert found.probabilities is None


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.rand(2, 3, 16, 16) * 255, ("values from", "in [0, 1]", "divided by 255")),
        (torch.rand(2, 3, 16, 16) - 0.5, ("values from -0.",)),
        (torch.full((1, 3, 16, 16), torch.nan), ("in [0, 1]",)),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), ("torch.uint8", "expected floats")),
        (torch.rand(3, 16, 16), ("[3, 16, 16]", "[B, 3, S, S]")),
        (torch.rand(2, 1, 16, 16), ("[2, 1, 16, 16]",)),
        (["a.png"], ("load_model",)),
    ],
    ids=["bytes", "negative", "nan", "uint8", "one", "grey", "files"],
)
def test_images_that_a_model_was_not_made_for_are_refused(images, words):
    with refused(DataError, *words):
        build_method("fedavg", num_classes=3).predict(images)
