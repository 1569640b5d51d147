"""FedAvg: average what clients learn."""

from __future__ import annotations

from feddg_bench.method import Method


class FedAvg(Method):
    """Federated averaging (McMahan et al., AISTATS 2017, arXiv 1602.05629, Algorithm 1).

    The base class unchanged: each client trains from the global model, and the server takes the
    mean of their models weighted by image counts.
    """
