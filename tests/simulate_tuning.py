"""Simulate errors of the tuning rule: ``python -m tests.simulate_tuning`` prints the guide's table.

A trial's value is the recipe's plus noise of its own. Noise that trials of a seed share cancels in
the rule's differences and is left out.
"""

from __future__ import annotations

import numpy as np

from feddg_bench.records.tuning import RULE, Rule, Trial, winners, with_leads

NOISE = (1.0, 2.0, 4.0)
"""Standard deviations of the difference between two trials of a seed, in points of accuracy."""
BETTER = 2.0
"""Advantage of the better trial, if there is one, in points."""


def winner(values: np.ndarray, rule: Rule) -> int:
    """Return the position of the winning trial; ``values`` are [trials, seeds]."""
    made = [
        Trial(settings={}, keys=(), id_val=one.mean(), values=tuple(one), seconds=None)
        for one in values
    ]
    return winners(with_leads(made), rule)[0]


def errors(
    seeds: int, noise: float, rule: Rule = RULE, *, trials: int = 4, draws: int = 4000
) -> tuple[float, float]:
    """Return the shares of false switches and of misses.

    A false switch leaves the recipe for one of ``trials - 1`` equal trials. A miss does not choose
    the trial that is better by `BETTER`, with all others equal.
    """
    rng = np.random.default_rng(0)
    better = np.zeros((trials, 1))
    better[1] = BETTER
    switched = missed = 0
    for _ in range(draws):
        equal = noise / np.sqrt(2) * rng.standard_normal((trials, seeds))
        switched += winner(equal, rule) != 0
        missed += winner(equal + better, rule) != 1
    return switched / draws, missed / draws


def main() -> None:
    """Print the table."""
    print("| rule | seeds | noise of a difference | false switches | misses |")
    print("| --- | ---: | ---: | ---: | ---: |")
    cases: tuple[tuple[str, Rule, int], ...] = (
        ("largest mean", "mean_last_fifth", 1),
        ("largest mean", "mean_last_fifth", 3),
        ("clear lead", RULE, 3),
        ("clear lead", RULE, 5),
    )
    for words, rule, seeds in cases:
        for noise in NOISE:
            false, missed = errors(seeds, noise, rule)
            print(f"| {words} | {seeds} | {noise:g} | {100 * false:.0f} % | {100 * missed:.0f} % |")


if __name__ == "__main__":
    main()
