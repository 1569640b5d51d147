"""FedAvg: average the clients' models."""

from __future__ import annotations

from feddg_bench.core.method import Method


class FedAvg(Method):
    """Federated averaging (McMahan et al., AISTATS 2017, arXiv 1602.05629, Algorithm 1).

    The base class unchanged: each client trains from the global model, and the server takes the
    mean of their models weighted by image counts.
    """

    group = "reference"
    tasks = ("classification", "regression")
    title = "FedAvg"
    citation = (
        "McMahan, Moore, Ramage, Hampson and Agüera y Arcas: Communication-Efficient Learning of "
        "Deep Networks from Decentralized Data, AISTATS 2017, arXiv 1602.05629"
    )


DEVIATIONS = (
    "FedDG_Benchmark, PARDON and FedCCRL average the batch counters of batch normalisation and "
    "cut the result to an integer. We take the largest.",
    "The code of FedIIR and of FedDG-GA weights clients equally, or by the size of a whole "
    "domain. We weight them by their training images (`federation.weighting`).",
)
"""Where published code differs from its paper, and what this module does."""
