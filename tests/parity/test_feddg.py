"""FedDG: the exchange of amplitudes in NumPy, the episode's gradient, the bank, and FedAvg."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.core.messages import Task, nbytes
from feddg_methods.feddg import FedDG, FedDGSettings, exchange_amplitudes, low_amplitudes
from tests.helpers import ALL, PLAIN, Pixels, hyper
from tests.tester import MethodTester, Twin

RNG = np.random.default_rng(0)
X, OTHER = RNG.random((2, 3, 9, 12)), RNG.random((2, 3, 9, 12))
IMAGES, OTHERS = torch.from_numpy(X).float(), torch.from_numpy(OTHER).float()


def low(half):
    """Return which frequencies of a 9 x 12 spectrum, in NumPy's order, are at most ``half``."""
    rows, columns = np.abs(np.fft.fftfreq(9, 1 / 9)), np.abs(np.fft.fftfreq(12, 1 / 12))
    return (rows[:, None] <= half) & (columns[None] <= half)


@pytest.mark.parametrize("half", [0, 1, 3])
def test_exchanged_amplitudes_in_numpy(half):
    lam = np.array([0.25, 1.0])
    own, other = np.fft.fft2(X), np.fft.fft2(OTHER)
    mixed = (1 - lam[:, None, None, None]) * np.abs(own) + lam[:, None, None, None] * np.abs(other)
    spectrum = np.where(low(half), mixed * np.exp(1j * np.angle(own)), own)
    back = np.fft.ifft2(spectrum)
    assert np.abs(back.imag).max() < 1e-12  # the window is symmetric, so images stay real
    amplitudes = low_amplitudes(OTHERS, half / 9 + 1e-6)
    assert amplitudes.shape == (2, 3, 2 * half + 1, 2 * half + 1)
    found = exchange_amplitudes(IMAGES, amplitudes, torch.from_numpy(lam).float())
    np.testing.assert_allclose(found, back.real, atol=1e-5)


def test_no_interpolation_returns_the_image():
    found = exchange_amplitudes(IMAGES, low_amplitudes(OTHERS, 0.2), torch.zeros(2))
    assert_close(found, IMAGES, rtol=0, atol=1e-5)


def test_the_window_of_one_frequency_is_the_mean_colour():
    found = exchange_amplitudes(IMAGES, low_amplitudes(OTHERS, 0.0), torch.ones(2))
    shift = (OTHERS.mean((2, 3)) - IMAGES.mean((2, 3)))[..., None, None]
    assert_close(found, IMAGES + shift, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------- an episode


def softmax_loss(w, x, y):
    """Return cross-entropy of a linear classifier [C, D + 1], and its gradient."""
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    p = np.exp(x @ w.T)
    p /= p.sum(1, keepdims=True)
    return -np.log(p[np.arange(len(y)), y]).mean(), (p - np.eye(len(w))[y]).T @ x / len(y)


@pytest.mark.parametrize("first_order", [False, True])
def test_the_loss_of_an_episode_and_its_gradient(first_order):
    x, t, y = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 4)), RNG.integers(0, 3, 5)
    values = {"beta": 0.5, "meta_weight": 2.0, "first_order": first_order}
    settings = validate(FedDGSettings, values)
    method = FedDG(settings, backbone=Pixels(), num_classes=3, train=TrainSettings()).double()
    head = method.classifier
    w = np.concatenate([head.weight.detach(), head.bias.detach()[:, None]], 1)

    def total(w, inner=None):
        loss, gradient = softmax_loss(w, x, y)
        return loss + 2 * softmax_loss(w - 0.5 * (gradient if inner is None else inner), t, y)[0]

    batch = tuple(map(torch.from_numpy, (x[:, :, None, None], y, t[:, :, None, None])))
    loss = method.training_step(batch, 0)
    loss.backward()
    assert loss.item() == pytest.approx(total(w), rel=1e-12)
    inner = softmax_loss(w, x, y)[1] if first_order else None
    found = np.concatenate([head.weight.grad, head.bias.grad[:, None]], 1)
    for at in np.ndindex(w.shape):
        shift = np.zeros_like(w)
        shift[at] = 1e-6
        slope = (total(w + shift, inner) - total(w - shift, inner)) / 2e-6
        assert found[at] == pytest.approx(slope, abs=1e-7)
    assert method.training_step(batch[:2], 0).item() == pytest.approx(softmax_loss(w, x, y)[0])


# ------------------------------------------------------------------------------- the bank


def test_the_bank_holds_the_mean_colours_of_all_images(start_run):
    """At 16 px the window is one frequency, whose amplitude is the sum over 16 x 16 pixels."""
    run = start_run("feddg", ALL)
    run.rounds(0)
    bank = run.server.broadcast["bank"]
    for name, index in run.federation.clients.items():
        sums = run.federation.images[index].sum((1, 2), dtype=np.float64) / 255
        np.testing.assert_allclose(bank[name][..., 0, 0], sums, rtol=1e-5)


def test_images_take_amplitudes_of_other_clients_only(start_run):
    run = start_run("feddg", ALL, PLAIN)
    run.rounds(0)
    bank = {name: torch.full((3, 3, 1, 1), float(name[-1])) for name in run.server.clients}
    task = Task("client_1", "fit", 1, run.server.weights, {"bank": bank})
    client = run.executor.worker._client(task)
    drawn = run.method.drawn(client, 200, client.generator("test"))
    assert sorted(set(drawn.flatten().tolist())) == [0, 2, 3]


def test_spectra_travel_once_up_and_all_of_them_down(start_run):
    run = start_run("feddg", ALL, hyper(alpha=0.07))  # a window of 3 x 3 at 16 px
    model, each, images = nbytes(run.server.weights), 3 * 9 * 4, 44
    first, second, third = (result.ledger.bytes for result in run.rounds(2))
    assert first == {"up": images * each, "down": 0}
    assert second == {"up": 4 * model, "down": 4 * (model + images * each)}
    assert third == {"up": 4 * model, "down": 4 * model}


class TestFedDG(MethodTester):
    name = "feddg"
    layer = {**ALL, **hyper(beta=0.01)}
    twins = (Twin({"meta_weight": 0.0}, ALL),)
    apart = ({"first_order": True}, {"alpha": 0.2}, {"beta": 0.1})
