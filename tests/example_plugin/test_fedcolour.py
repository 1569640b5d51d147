"""The contract of all methods, and what is this one's own."""

import torch
from fedcolour import Fedcolour, restyle

from feddg_bench.testing import contract_tests, start_toy_run


def test_contract():
    contract_tests(Fedcolour)


def test_images_take_the_statistics_of_the_style():
    images = 0.4 + 0.2 * torch.rand(4, 3, 16, 16)
    style = torch.tensor([[0.4, 0.5, 0.6], [0.05, 0.1, 0.02]])
    std, mean = torch.std_mean(restyle(images, style, 1.0), (2, 3))
    torch.testing.assert_close(mean, style[0].expand(4, 3), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(std, style[1].expand(4, 3), rtol=1e-3, atol=1e-3)


def test_each_client_sends_one_style_and_receives_all():
    run = start_toy_run(Fedcolour)
    run.rounds(1)
    styles = run.server.broadcast["styles"]
    assert sorted(styles) == list(run.server.clients)
    assert {style.shape for style in styles.values()} == {(2, 3)}


def test_without_strength_it_is_fedavg():
    mine, fedavg = start_toy_run(Fedcolour, {"hyper": {"strength": 0}}), start_toy_run("fedavg")
    mine.rounds(1)
    fedavg.rounds(1)
    torch.testing.assert_close(mine.server.weights, fedavg.server.weights)
