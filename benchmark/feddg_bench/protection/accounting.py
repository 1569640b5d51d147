"""Epsilon of released sums: Opacus' accountants, and one for cohorts of a fixed size."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence

from feddg_bench.common.errors import SettingsError

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Orders of Rényi divergences, of which the best is used."""


def check_accountant(module: str, what: str) -> None:
    """Check that a package is installed; ``what`` names the feature that needs it.

    Raises:
        SettingsError: If it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise SettingsError(
            f"{what} needs the package {module}: install it by pip install 'feddg-bench[privacy]'"
        )


def epsilon(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    *,
    sampling: str = "poisson",
    accountant: str = "rdp",
) -> float:
    """Return the epsilon of ``steps`` releases of a sum with Gaussian noise.

    Args:
        noise_multiplier: Standard deviation of the noise, in units of the largest length of a term.
        sample_rate: Probability, or share, with which a client is sampled, in (0, 1].
        steps: Number of releases.
        delta: In (0, 1).
        sampling: ``poisson``: clients are sampled independently, and neighbours have one client
            more or less. ``fixed``: cohorts have a fixed size, and neighbours have one client
            replaced by another, which moves a sum by two lengths.
        accountant: ``rdp``, or ``prv``, which is tighter and for ``poisson`` only.

    Raises:
        SettingsError: If Opacus is not installed.
    """
    check_accountant("opacus", "an epsilon")
    with warnings.catch_warnings():  # its imports warn of PyTorch's own changes
        warnings.simplefilter("ignore")
        from opacus.accountants import create_accountant
        from opacus.accountants.analysis.rdp import get_privacy_spent

        if sampling == "fixed":
            orders = [order for order in ORDERS if order == int(order)]
            rdp = [steps * rdp_of_fixed(noise_multiplier, sample_rate, int(o)) for o in orders]
            value = get_privacy_spent(orders=orders, rdp=rdp, delta=delta)[0]
        else:
            account = create_accountant(accountant)
            account.history = [(noise_multiplier, sample_rate, steps)]
            extra = {"alphas": list(ORDERS)} if accountant == "rdp" else {}
            value = account.get_epsilon(delta=delta, **extra)
    return float(value)


def rdp_of_fixed(noise_multiplier: float, sample_rate: float, order: int) -> float:
    """Return the Rényi divergence of one release over a cohort of a fixed size.

    Source: Wang, Balle and Kasiviswanathan, AISTATS 2019, arXiv 1808.00087, Theorem 9, with the
    Gaussian mechanism, whose divergence of order j is 2 j / z^2 if a term of length 1 is replaced.
    Without sampling, the result is that divergence.

    Args:
        noise_multiplier: z.
        sample_rate: Share of the clients in a cohort, in (0, 1].
        order: alpha, 2 or more.
    """
    plain = [2 * j / noise_multiplier**2 for j in range(order + 1)]
    if sample_rate == 1:
        return plain[order]
    # The logarithm of each term of the sum over j from 2 to alpha.
    second = min(math.log(4) + _log_expm1(plain[2]), math.log(2) + plain[2])
    terms = [0.0]
    for j in range(2, order + 1):
        factor = second if j == 2 else math.log(2) + (j - 1) * plain[j]
        terms.append(j * math.log(sample_rate) + _log_choose(order, j) + factor)
    return min(_log_sum(terms) / (order - 1), plain[order])


def _log_expm1(x: float) -> float:
    return math.log(math.expm1(x)) if x < 30 else x


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_sum(terms: Sequence[float]) -> float:
    largest = max(terms)
    return largest + math.log(math.fsum(math.exp(term - largest) for term in terms))
