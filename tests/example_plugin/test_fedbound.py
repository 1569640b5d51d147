"""The contract of all methods, and what is this one's own."""

from fedbound import Fedbound

from feddg_bench.testing import contract_tests, start_toy_run


def test_contract():
    contract_tests(Fedbound)


def test_no_weight_moves_farther_than_the_bound():
    run = start_toy_run(Fedbound, {"hyper": {"bound": 0.001}})
    before = {name: run.server.weights[name].clone() for name in run.method.trainable}
    run.rounds(1)
    moved = [(run.server.weights[name] - before[name]).abs().max() for name in before]
    assert 0 < max(moved) <= 0.00101
