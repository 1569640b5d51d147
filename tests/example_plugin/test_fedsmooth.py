"""The contract of all methods, and what is this one's own."""

import torch
from fedsmooth import Fedsmooth

from feddg_bench.testing import contract_tests, start_toy_run


def test_contract():
    contract_tests(Fedsmooth)


def test_without_smoothing_it_is_fedavg():
    mine, fedavg = start_toy_run(Fedsmooth, {"hyper": {"smoothing": 0}}), start_toy_run("fedavg")
    mine.rounds(1)
    fedavg.rounds(1)
    torch.testing.assert_close(mine.server.weights, fedavg.server.weights)


def test_the_loss_is_the_mixture_of_two_cross_entropies():
    method = start_toy_run(Fedsmooth, {"hyper": {"smoothing": 0.3}}).method
    images, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    logs = method(images).log_softmax(1)
    expected = -0.7 * logs[range(4), labels].mean() - 0.3 * logs.mean()
    torch.testing.assert_close(method.training_step((images, labels), 0), expected)
