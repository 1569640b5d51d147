"""Fedbound: say in one line what it does."""

from collections.abc import Iterable

from pydantic import Field

from feddg_bench import LocalUpdate, Method, MethodSettings, Reply, Server, Weights


class FedboundSettings(MethodSettings):
    """Settings of this method; on the command line hyper.<name>=VALUE."""

    bound: float = Field(1.0, ge=0)
    """Largest change of a weight in a round."""


class Fedbound(Method):
    """FedAvg whose server moves no weight farther than the bound (cite your paper here)."""

    title = "Fedbound"
    Settings = FedboundSettings
    settings: FedboundSettings
    version = 1  # increment when results can change, so that old and new records are not mixed
    citation = "Authors, title, venue and year"

    # The client half is FedAvg's. To change it, override training_step(batch, batch_idx).

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        new = super().aggregate(server, updates)
        bound = self.settings.bound
        for name in self.trainable:
            old = server.weights[name]
            new[name] = old + (new[name] - old).clamp(-bound, bound)
        return new
