"""The contract of all methods, and what is this one's own."""

import torch
from fedmeans import Fedmeans, distance

from feddg_bench.testing import contract_tests, start_toy_run


def test_contract():
    contract_tests(Fedmeans)


def test_the_distance_leaves_out_absent_classes():
    features = torch.tensor([[1.0, 2.0], [5.0, 5.0]])
    means = torch.tensor([[3.0, 3.0], [0.0, 0.0]])
    assert distance(features, means) == 1.25


def test_a_round_broadcasts_one_mean_of_each_class():
    run = start_toy_run(Fedmeans)
    run.rounds(1)
    means = run.server.broadcast["means"]
    assert means.shape == (run.method.num_classes, run.method.num_features)
    assert means.any(1).all()


def test_without_pull_it_is_fedavg():
    mine, fedavg = start_toy_run(Fedmeans, {"hyper": {"pull": 0}}), start_toy_run("fedavg")
    mine.rounds(2)
    fedavg.rounds(2)
    torch.testing.assert_close(mine.server.weights, fedavg.server.weights)
