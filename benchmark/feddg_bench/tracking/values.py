"""What W&B is told about a run: names, settings, metrics of a round, summary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import feddg_bench
from feddg_bench.config.reading import composed
from feddg_bench.records.measured import Evaluation
from feddg_bench.records.record import RoundRecord, RunRecord
from feddg_bench.records.rules import RULES, choose_evaluation, chosen_rounds, pooled_metric

if TYPE_CHECKING:
    from feddg_bench.runs.request import Plan


def metrics(entry: RoundRecord) -> dict[str, float]:
    """Return a round's metrics by name, from its entry in the record.

    These are ``train/loss``, ``seconds/training``, ``bytes/up``, ``dropped`` and the like. If the
    round was evaluated, there is also every metric of a domain, as ``test/<domain>/accuracy``, and
    of all images of a split if it has such a value, as ``test/accuracy``. Shares are in [0, 1].
    """
    values = {f"train/{name}": value for name, value in entry.train.items()}
    values |= {f"seconds/{phase}": value for phase, value in entry.seconds.items()}
    values |= {"bytes/up": entry.bytes.up, "bytes/down": entry.bytes.down}
    values |= {"dropped": len(entry.dropped), "skipped": int(entry.skipped)}
    return values | _measured(entry.evaluation or {})


def run_summary(record: RunRecord) -> dict[str, float]:
    """Return what each selection rule reports: the last round it chooses, and its metrics.

    Rules that look at test images are left out, and so are rules whose split the run lacks.
    """
    evaluated = [(e.round, e.evaluation) for e in record.rounds if e.evaluation is not None]
    evaluations = [evaluation for _, evaluation in evaluated]
    values: dict[str, float] = {}
    for rule in RULES:
        if rule == "oracle":
            continue
        places = chosen_rounds(evaluations, rule, record.metric.name)
        chosen = choose_evaluation(evaluations, rule, record.metric.name)
        if chosen is None:
            continue
        values[f"{rule}/round"] = evaluated[places[-1]][0]
        values |= {f"{rule}/{n}": v for n, v in _measured(chosen).items()}
    values |= {f"once/seconds/{p}": s for p, s in record.once.seconds.items()}
    return values | {
        "once/bytes/up": record.once.bytes.up,
        "once/bytes/down": record.once.bytes.down,
    }


def _measured(evaluation: Evaluation) -> dict[str, float]:
    values: dict[str, float] = {}
    for split, domains in evaluation.items():
        for metric in dict.fromkeys(name for measured in domains.values() for name in measured):
            if metric in ("images", "worst_group_name", "only_class"):
                continue
            by_domain = {name: part[metric] for name, part in domains.items() if metric in part}
            known = {domain: value for domain, value in by_domain.items() if math.isfinite(value)}
            values |= {f"{split}/{composed(name)}/{metric}": v for name, v in known.items()}
            if (
                known == by_domain
                and (whole := pooled_metric(evaluation, split, metric)) is not None
            ):
                values[f"{split}/{metric}"] = whole
    return values


def identity(record: RunRecord, name: str, project: str | None) -> dict[str, Any]:
    """Return W&B's names for the run; without a project, the agent's environment gives its id.

    The entity is always left to W&B (``WANDB_ENTITY``).
    """
    tags = (record.method, record.dataset, record.protocol, record.scenario.name, record.recipe)
    own = {} if project is None else {"project": project, "id": record.key, "resume": "allow"}
    return own | {
        "name": composed(name)[:128],
        "group": composed(f"{record.dataset} {record.protocol} {record.recipe}")[:128],
        "tags": list(dict.fromkeys(composed(tag)[:64] for tag in tags)),  # W&B's limit
    }


def config(plan: Plan) -> dict[str, Any]:
    """Return the settings that decide the numbers, and other facts that tell runs apart."""
    more = {
        "recipe": plan.recipe,
        "key": plan.key,
        "method_version": plan.version,
        "feddg_bench": feddg_bench.__version__,
    }
    return plan.canonical | more
