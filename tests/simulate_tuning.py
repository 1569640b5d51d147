"""Simulate errors of the tuning rule: ``python -m tests.simulate_tuning`` prints the guide's table.

A trial's value is the recipe's plus noise of its own. Noise that trials of a seed share cancels in
the rule's differences and is left out.
"""

from __future__ import annotations

import numpy as np

from feddg_bench.records.tuning import RULE, Rule, Trial, is_out, winners, with_leads

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


def raced(values: np.ndarray) -> list[int]:
    """Return the number of seeds of each trial in a race; ``values`` are [trials, seeds]."""
    trials, seeds = values.shape
    many = [
        next((n for n in range(1, seeds) if is_out(row[:n].tolist(), trials - 1, seeds)), seeds)
        for row in values[1:] - values[0]
    ]
    return [max(many), *many]


def errors(
    seeds: int, noise: float, rule: Rule = RULE, *, trials: int = 4, draws: int = 4000
) -> tuple[float, float, float]:
    """Return the shares of false switches and of misses, and the mean number of runs.

    A false switch leaves the recipe for one of ``trials - 1`` equal trials. A miss does not choose
    the trial that is better by `BETTER`, with all others equal. Runs are those of equal trials.
    """
    rng = np.random.default_rng(0)
    better = np.zeros((trials, 1))
    better[1] = BETTER
    switched = missed = made = 0
    for _ in range(draws):
        equal = noise / np.sqrt(2) * rng.standard_normal((trials, seeds))
        switched += winner(equal, rule) != 0
        missed += winner(equal + better, rule) != 1
        made += sum(raced(equal)) if rule == "raced" else equal.size
    return switched / draws, missed / draws, made / draws


def main() -> None:
    """Print the table."""
    print("| rule | seeds | noise of a difference | false switches | misses | runs |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    cases: tuple[tuple[str, Rule, int], ...] = (
        ("largest mean", "mean_last_fifth", 1),
        ("largest mean", "mean_last_fifth", 3),
        ("clear lead", RULE, 3),
        ("clear lead", RULE, 5),
        ("race", "raced", 3),
        ("race", "raced", 5),
    )
    for words, rule, seeds in cases:
        for noise in NOISE:
            false, missed, made = errors(seeds, noise, rule)
            shares = f"{100 * false:.0f} % | {100 * missed:.0f} %"
            print(f"| {words} | {seeds} | {noise:g} | {shares} | {made:.1f} |")


if __name__ == "__main__":
    main()
