"""FedAvg in Flower's simulation, in an environment of its own: ``python flower.py ROUNDS``.

It prints the seconds of the rounds without start-up. The task is that of the benchmark ``loop``.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

CLIENTS, IMAGES, BATCH, CLASSES, LR = 50, 50, 10, 7, 1e-3


def main(rounds: int) -> None:
    import torch
    import torch.nn.functional as F
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation
    from torch import nn

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    class One(NumPyClient):
        def __init__(self, number: int) -> None:
            torch.set_num_threads(1)
            draw = torch.Generator().manual_seed(number)
            images = torch.rand(IMAGES, 3, 32, 32, generator=draw)
            labels = torch.randint(0, CLASSES, (IMAGES,), generator=draw)
            self.data = torch.utils.data.TensorDataset(images, labels)
            self.net = network()

        def fit(self, parameters: Any, config: Any) -> Any:
            for own, given in zip(self.net.parameters(), parameters, strict=True):
                own.data = torch.tensor(given)
            optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
            for images, labels in torch.utils.data.DataLoader(self.data, BATCH, shuffle=True):
                loss = F.cross_entropy(self.net(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return [p.detach().numpy() for p in self.net.parameters()], IMAGES, {}

    ends: list[float] = []

    class Timed(FedAvg):
        def aggregate_fit(self, *arguments: Any) -> Any:
            found = super().aggregate_fit(*arguments)
            ends.append(time.perf_counter())
            return found

    def server(_: Any) -> ServerAppComponents:
        strategy = Timed(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=CLIENTS,
            min_available_clients=CLIENTS,
            initial_parameters=ndarrays_to_parameters(
                [p.detach().numpy() for p in network().parameters()]
            ),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

    def client(context: Any) -> Any:
        return One(context.node_config["partition-id"]).to_client()

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=client),
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 1, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    print((ends[-1] - ends[0]) / (rounds - 1))


if __name__ == "__main__":
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    main(int(sys.argv[1]))
