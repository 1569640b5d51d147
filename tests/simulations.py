"""Simulate how often the tables' tests are wrong: ``python -m tests.simulations``.

It writes ``results/simulations.md``. The vectorised code takes ten seconds on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from feddg_bench.records.robustness import excess, pseudo_values
from feddg_bench.records.statistics import LEVEL

FILE = Path(__file__).parents[1] / "results" / "simulations.md"
DRAWS = 20_000
SCENARIOS, SEEDS = 4, 3
HELD = (3.0, 7.0)
"""Range of false positives, in percent, within which a nominal 5 % holds."""
Values = NDArray[np.float64]


def rejected(means: Values) -> Values:
    """Return for each draw whether the t-test over scenarios rejects, as in `statistics.t_test`.

    Args:
        means: The difference of each scenario, [draws, S].
    """
    many = means.shape[1]
    ratio = means.mean(axis=1) / (means.std(axis=1, ddof=1) / np.sqrt(many))
    found: Values = abs(ratio) > stdtrit(many - 1, 1 - LEVEL / 2)
    return found


# ---------------------------------------------------------------------------- the plain difference


class Scatter(NamedTuple):
    """Distribution of the runs' differences in a world without a true mean difference."""

    what: str
    seeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # standard deviation over seeds, by scenario
    effect: float = 0.0  # standard deviation of the scenarios' true differences
    fixed: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # true differences in these scenarios
    collapses: float = 0.0  # share of runs that lose `LOSS` points; the others gain to compensate
    typical: bool = False  # if true, the others gain nothing


LOSS = 15.0
SCATTERS = (
    Scatter("equal scatter"),
    Scatter("scenarios that differ at random", effect=2.0),
    # Standard deviations of the differences from FedAvg in `pacs-ltdo-laptop-tuned`.
    Scatter("one scenario more noisy, as with PARDON", (2.09, 1.63, 5.73, 1.80)),
    Scatter("one scenario more noisy, as with FedCCRL", (0.50, 14.88, 5.75, 4.45)),
    Scatter("one scenario more noisy, as with FedGMA", (2.92, 17.45, 3.04, 0.92)),
    Scatter("four fixed effects, +3, -3, +1, -1", fixed=(3.0, -3.0, 1.0, -1.0)),
    Scatter("8 % of runs collapse, equal means", collapses=0.08),
    Scatter("8 % of runs collapse, equal otherwise", collapses=0.08, typical=True),
)


def differences(rng: np.random.Generator, scatter: Scatter) -> Values:
    """Return differences of runs, [draws, S, seeds]."""
    shape = DRAWS, SCENARIOS, SEEDS
    found = rng.standard_normal(shape) * np.array(scatter.seeds)[:, None]
    found += scatter.effect * rng.standard_normal((DRAWS, SCENARIOS, 1))
    found += np.array(scatter.fixed)[:, None]
    found -= LOSS * (rng.random(shape) < scatter.collapses)
    return found if scatter.typical else found + LOSS * scatter.collapses


def false_positives() -> Iterator[tuple[str, float, float]]:
    """Yield each kind of scatter with the percentages rejected by tests of means and of medians."""
    for number, scatter in enumerate(SCATTERS):
        found = differences(np.random.default_rng(number), scatter)
        pools = found.mean(axis=2), np.median(found, axis=2)
        mean, median = (100 * float(rejected(pool).mean()) for pool in pools)
        yield scatter.what, mean, median


# ---------------------------------------------------------------------------- exactly these units


class Error(NamedTuple):
    """Distribution of differences whose mean over exactly these units is 0."""

    what: str
    common: float = 0.0  # standard deviation of a seed's effect on all units
    seeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # standard deviation over seeds, by unit
    fixed: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # true differences in these units
    collapses: float = 0.0  # share of runs that lose `LOSS` points; the others gain to compensate


COMMON = 0.7
"""Standard deviation of a common effect whose mean square is about three times the residual one."""
ERRORS = (
    Error("no common effect"),
    Error("common effect of a seed", COMMON),
    Error("one unit more noisy", 0.0, (0.5, 14.9, 5.8, 4.5)),
    Error("one unit more noisy, and a common effect", 4.0, (0.5, 14.9, 5.8, 4.5)),
    Error(
        "fixed effects +3, -3, +1, -1, and a common effect", COMMON, fixed=(3.0, -3.0, 1.0, -1.0)
    ),
    Error("8 % of runs collapse, equal means", collapses=0.08),
)
FEW = (5, 10)
"""Numbers of seeds for the test over seeds."""
ROWS = 12
"""Methods in a table that share FedAvg's runs."""


def of_seeds(rng: np.random.Generator, error: Error, seeds: int, rows: int = 0) -> Values:
    """Return differences of runs, [draws, S, seeds], or of several rows, [draws, rows, S, seeds].

    Rows share the reference's half of each variance.
    """
    shape = DRAWS, SCENARIOS, seeds
    own = (DRAWS, rows, SCENARIOS, seeds) if rows else shape

    def noise(of: tuple[int, ...]) -> Values:
        drawn = rng.standard_normal(of) * np.array(error.seeds)[:, None]
        drawn += error.common * rng.standard_normal((*of[:-2], 1, seeds))
        drawn -= LOSS * ((rng.random(of) < error.collapses) - error.collapses)
        found: Values = drawn
        return found

    drawn = noise(own)
    if rows:
        drawn = (drawn - noise(shape)[:, None]) / np.sqrt(2)
    return drawn + np.array(error.fixed)[:, None]


def pooled(found: Values) -> Values:
    """Return whether a test rejects that pools the scatter of seeds within units.

    It has S (n - 1) degrees of freedom, and is not used: effects that a seed has on all units are
    no part of its error.

    Args:
        found: Differences, [draws, S, n].
    """
    _, units, seeds = found.shape
    error = np.sqrt(found.var(axis=2, ddof=1).mean(axis=1) / (units * seeds))
    rejects: Values = abs(found.mean(axis=(1, 2))) / error > stdtrit(units * (seeds - 1), 0.975)
    return rejects


def same_units() -> Iterator[tuple[str, int, float, float]]:
    """Yield kind of error, seeds, and the percentages rejected by the test and by `pooled`."""
    for number, error in enumerate(ERRORS):
        for seeds in FEW:
            found = of_seeds(np.random.default_rng([7, number, seeds]), error, seeds)
            yield (
                error.what,
                seeds,
                100 * float(rejected(found.mean(axis=1)).mean()),
                100 * float(pooled(found).mean()),
            )


def in_a_family(seeds: int) -> tuple[float, float]:
    """Return how often any of `ROWS` equal methods differs, after Holm's correction and before.

    Holm's procedure rejects any of them if the smallest p is below the level over their number.
    """
    found = of_seeds(np.random.default_rng([8, seeds]), ERRORS[1], seeds, ROWS).mean(axis=2)
    ratio = abs(found.mean(axis=2)) / (found.std(axis=2, ddof=1) / np.sqrt(seeds))
    single, each = (stdtrit(seeds - 1, 1 - LEVEL / (2 * many)) for many in (1, ROWS))
    return tuple(100 * float((ratio > t).any(axis=1).mean()) for t in (each, single))


# ------------------------------------------------------------------------- at equal `id_test`


def logistic(logit: Values) -> Values:
    """Return percentages for logits."""
    found: Values = 100 / (1 + np.exp(-logit))
    return found


def runs(rng: np.random.Generator, ids: Values, lines: tuple[Values, Values, Values]) -> Values:
    """Return accuracies on ``id_test`` and ``test``, means over seeds, [draws, S, K, 2].

    Args:
        rng: Random generator.
        ids: Logit of the expected ``id_test``, [K].
        lines: For each scenario, intercept and slope of ``test`` on ``id_test`` in logits, and
            the offset of its ``id_test`` logits; each [draws, S, 1, 1].
    """
    intercept, slope, easier = lines
    whole = DRAWS, SCENARIOS, SEEDS
    x = ids + easier + rng.normal(0, 0.06, (*whole, 1))
    y = intercept + slope * x + rng.normal(0, 0.08, (*whole, 1))
    # A split has the same images in all rounds, so half of the noise is shared.
    noise = (rng.normal(0, 1.06, (*whole, many)) for many in (1, len(ids), 1, len(ids)))
    pair = np.stack([logistic(x) + next(noise) + next(noise), logistic(y)], axis=-1)
    pair[..., 1] += next(noise) + next(noise)
    found: Values = pair.mean(axis=2)
    return found


def at_equal_id(first: float, behind: float, better: float) -> tuple[float, float, float, float]:
    """Return the mean plain difference and its rejections (%), and the same at equal ``id_test``.

    FedAvg's evaluated rounds rise from ``first`` to 85 % on ``id_test``. The method ends ``behind``
    points lower on the same line, and ``better`` points above that line.
    """
    rng = np.random.default_rng([int(first), int(behind) + 100, int(better)])
    shape = DRAWS, SCENARIOS, 1, 1
    lines = rng.normal(-0.8, 0.6, shape), rng.normal(0.8, 0.15, shape), rng.normal(0, 0.3, shape)
    ends = np.array([first, 85.0, 85.0 - behind]) / 100
    start, end, other = np.log(ends / (1 - ends))
    curve = runs(rng, np.linspace(start, end, 8), lines)
    method = runs(rng, np.array([other]), lines)[:, :, 0]
    method[..., 1] += better
    reference = curve[:, :, -1]
    plain = method[..., 1] - reference[..., 1]
    pseudo = pseudo_values(method, reference, curve)
    return (
        float(plain.mean()),
        100 * float(rejected(plain).mean()),
        float(excess(method, reference, curve).mean()),
        100 * float(rejected(pseudo).mean()),
    )


METHODS = ((0.0, 0.0), (3.0, 0.0), (6.0, 0.0), (-3.0, 0.0), (0.0, 3.0), (6.0, 3.0))
"""Points behind FedAvg on `id_test`, and points above its line."""
WORLDS = (
    *((60.0, *method) for method in METHODS),
    *((80.0, *method) for method in METHODS),
    *((85.0 - behind, behind, 0.0) for behind in (1.0, 2.0, 3.0, 4.0)),  # just within range
)

# --------------------------------------------------------------------------------------- the file


def verdict(rate: float) -> str:
    """Return a verdict on whether a test with this percentage of false positives holds."""
    low, high = HELD
    return "too few" if round(rate, 1) < low else "too many" if round(rate, 1) > high else "holds"


def points(value: float) -> str:
    """Return percentage points with one decimal, without a minus sign before zero."""
    return f"{round(value, 1) + 0:+.1f}"


def text() -> str:
    """Return the file's text."""
    lines = [
        "# Simulations of the tables' tests",
        "",
        f"Written by `python -m tests.simulations`: {DRAWS:,} draws each, {SCENARIOS} scenarios, "
        f"{SEEDS} seeds, nominal 5 %.",
        "",
        "## False positives of the t-test over scenarios",
        "",
        "Percentage of tables in which two methods without a mean difference differ significantly. "
        f"The test holds from {HELD[0]:g} to {HELD[1]:g} %.",
        "",
        "| scatter of the differences | means over seeds | | medians over seeds | |",
        "| --- | ---: | --- | ---: | --- |",
        *(
            f"| {what} | {mean:.1f} | {verdict(mean)} | {median:.1f} | {verdict(median)} |"
            for what, mean, median in false_positives()
        ),
        "",
        "- If the seeds of one scenario scatter far more than those of the others, the test is "
        "blind: it rejects less often than 5 %, and has little power.",
        "- Fixed effects: the test treats the four scenarios as a sample of similar ones. Without "
        "significance, a difference in these four can still be real.",
        "- If runs collapse occasionally, the test of means does not hold: tables without a "
        "collapse, 37 % of them, favour the fragile method. In the row with equal means, a typical "
        "run of that method *is* better by 1.2 points, so medians, which describe typical runs, "
        "rightly differ; if typical runs are equal, the test of medians holds.",
        "",
        "## The test for exactly these units",
        "",
        "A seed's mean over the units is one number. Student's t-test over these numbers, with a "
        "degree of freedom less than there are seeds, asks whether the mean difference in exactly "
        "these units is 0. Effects that a seed has on all units are part of its error. Pooling the "
        "scatter within units gives more degrees of freedom, but is wrong if there are such "
        "effects, so tables do not use it. The common effect here has three times the residual "
        "mean square; in our records it has two to three times.",
        "",
        "| error | seeds | rejected, % | | pooled, % |",
        "| --- | ---: | ---: | --- | ---: |",
        *(
            f"| {what} | {seeds} | {rate:.1f} | {verdict(rate)} | {other:.1f} |"
            for what, seeds, rate, other in same_units()
        ),
        "",
        f"{ROWS} methods equal to FedAvg that share its runs, {FEW[0]} seeds: at least one differs "
        "significantly in {:.1f} % of tables after Holm's correction, in {:.1f} % "
        "without.".format(*in_a_family(FEW[0])),
        "",
        "## The difference on `test` at equal `id_test`",
        "",
        "FedAvg is evaluated in 8 rounds, up to 85 % on `id_test`. A method that only trains more "
        "slowly ends on FedAvg's line, at a lower `id_test`: its excess must be 0, and significant "
        "in 5 % of tables.",
        "",
        "| FedAvg's first `id_test` | method behind | true excess | difference | significant, % | "
        "excess | significant, % |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for first, behind, better in WORLDS:
        plain, sure, above, certain = at_equal_id(first, behind, better)
        lines.append(
            f"| {first:.0f} | {behind:.0f} | {better:.0f} | {points(plain)} | {sure:.0f} | "
            f"{points(above)} | {certain:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
