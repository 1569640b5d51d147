"""ERM: the centralised reference that pools all training images."""

from __future__ import annotations

from feddg_bench.method import Method


class ERM(Method):
    """Empirical risk minimisation on pooled data, "DeepAll" in domain generalisation papers.

    Federated averaging with one client that holds everything and keeps its optimizer: a round is
    the local epochs of ordinary training. As a LightningModule it also runs under
    ``lightning.Trainer`` as it is.
    """

    group = "reference"
    citation = (
        "Gulrajani and Lopez-Paz: In Search of Lost Domain Generalization, ICLR 2021, "
        "arXiv 2007.01434 (as the baseline ERM)"
    )
    deviations = (
        "FedDG_Benchmark makes a new optimizer in each epoch, so that Adam forgets its moments; "
        "ours is kept: train.optimizer_state.",
    )

    needs = {  # noqa: RUF012 - read only
        "partition": {"kind": "pooled", "clients": 1},
        "federation": {"per_round": None},
        "train": {"optimizer_state": "persist"},
    }
