"""What leaves a client, who sees it and what attacks learn from it, for cards and one table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from feddg_attacks.records import AttackRecord, AttackResult, Interval, overall
from feddg_bench.analysis.sheets import csv_lines
from feddg_bench.analysis.tables.setups import usual_settings
from feddg_bench.analysis.tables.titles import dataset_title, method_title
from feddg_bench.config.layers import dotted
from feddg_bench.protection.possible import obstacles, sent_by
from feddg_bench.records.differences import assignments, differences, values, varying
from feddg_bench.records.record import rounded_up
from feddg_bench.records.runs import RecordedRun, key_metric

if TYPE_CHECKING:
    from feddg_bench.core.method import Method

MEASURED: Mapping[str, tuple[str, str, str]] = {
    "membership AUC": ("membership", "", "auc"),
    "domains, rank": ("property", "domains", "rank"),
    "classes, rank": ("property", "classes", "rank"),
    "image, rank": ("gradient-inversion", "cosine", "rank"),
    "image, PSNR dB": ("gradient-inversion", "cosine", "psnr"),
    "image, LPIPS": ("gradient-inversion", "cosine", "lpips"),
    "style drawn, rank": ("style-inversion", "", "rank"),
    "style drawn, LPIPS": ("style-inversion", "", "lpips"),
}
"""Head of a column -> kind of attack, what it asks about, and the figure shown."""

IN_SHORT = tuple(head for head in MEASURED if head.endswith(("AUC", "rank")))
"""Heads of the columns in the short table: figures for which 0.5 is chance."""

EPSILON = "epsilon at"
"""Head of the column of guarantees."""

SAME = {
    *("seed", "scenario", "protocol", "partition.clients"),
    *("federation.rounds", "federation.per_round"),  # how often an item was seen says more
}
"""Dotted keys of the settings in which the runs of one cell may differ."""

FRAME = ("backbone.name", "data.image_size")
"""Dotted keys of the settings that say what was attacked; a kind of attack may set its own."""


@dataclass(frozen=True)
class Found:
    """A figure over records that differ only in settings of `SAME`, such as scenario and seed."""

    images: int  # of a client
    bytes: int  # of its message
    how: str  # settings that vary between records and are not the usual ones here
    frame: str  # settings of `FRAME` that all attacks of the kind share, unlike the recipe
    interval: Interval | None  # `None` where a control failed
    runs: int

    @property
    def settings(self) -> str:
        """The unusual settings: `how`, then `frame`; empty if there are none."""
        return ", ".join(filter(None, (self.how, self.frame)))

    @property
    def text(self) -> str:
        """The mean over runs, the interval or the range of intervals, and the client's images."""
        i = self.interval
        figure = "withheld" if i is None else f"{i.value:.2f} [{i.low:.2f}, {i.high:.2f}]"
        return f"{figure} (n = {self.images})"


@dataclass(frozen=True)
class Exposure:
    """One item that a method's clients send, and what is known about it."""

    method: str
    item: str
    secure: str  # why the method does not work under secure sums; "" if it does
    client: str  # why there is no guarantee for clients' updates; "" if there can be one
    style: str  # likewise for what is sent once
    found: Mapping[str, Sequence[Found]]  # figures by head of column
    guarantees: Sequence[Guarantee]  # of recorded runs


@dataclass(frozen=True)
class Guarantee:
    """The guarantee of some runs, and the key metric of their models."""

    epsilon: float  # the largest among the runs
    delta: float
    value: float  # mean of the key metric on test, as shown
    runs: int
    clients: int

    @property
    def text(self) -> str:
        """The guarantee at the accuracy that it leaves; epsilon is rounded up."""
        said = f"{rounded_up(self.epsilon)} at {self.value:.1f}"
        return f"{said} (delta {self.delta:g}, N = {self.clients}, {self.runs} runs)"


def exposures(
    methods: Mapping[str, type[Method]],
    records: Iterable[AttackRecord],
    runs: Sequence[RecordedRun] = (),
) -> Iterator[Exposure]:
    """Yield each item that a method's clients send, with what the server's attacks learn from it.

    ``records`` and ``runs`` must be of one data set and recipe.
    """
    by_server = [record for record in records if record.attacker == "server"]
    for name, method in methods.items():
        own = [record for record in by_server if record.method == name]
        usual = (own and usual_settings(own[0].recipe, own[0].dataset, name)) or {}
        why = obstacles(method)
        for sent in sent_by(method.uplink):
            yield Exposure(
                method=name,
                item=sent.name,
                secure=why["secure"],
                client=why["dp_client"],
                style=why["dp_style"],
                found={
                    head: list(_found(own, usual, sent.name, *which))
                    for head, which in MEASURED.items()
                },
                guarantees=_guarantees([run for run in runs if run.method == name], sent.name),
            )


def _guarantees(runs: Sequence[RecordedRun], item: str) -> list[Guarantee]:
    """Return a guarantee per set of runs that differ only in scenario and seed, strictest first.

    Those of another protocol, version or data differ in more.
    """
    mechanism = "dp_client" if item == "weights" else "dp_style"
    found: dict[tuple[str, float, int], list[tuple[float, float]]] = {}
    for run in runs:
        p, s = run.privacy, run.settings
        if p is None or p.mechanism != mechanism or p.epsilon is None or p.delta is None:
            continue
        value = key_metric(run, run.evaluation("last"), "test")
        # With `dp_style`, the text of `protects` names the items that were sent.
        if value is not None and (mechanism == "dp_client" or item in str(p.protects)):
            frame = run.protocol, run.version, run.fingerprint, sorted(s.items())
            alike = (repr(frame), p.delta, s["partition.clients"])
            found.setdefault(alike, []).append((p.epsilon, value))
    return sorted(
        (
            Guarantee(
                epsilon=max(e for e, _ in of),
                delta=delta,
                value=statistics.mean(v for _, v in of),
                runs=len(of),
                clients=clients,
            )
            for (_, delta, clients), of in found.items()
        ),
        key=lambda guarantee: guarantee.epsilon,
    )


def _found(
    records: Sequence[AttackRecord],
    usual: Mapping[str, Any],
    item: str,
    kind: str,
    about: str,
    figure: str,
) -> Iterator[Found]:
    """Yield one figure for each client size and each combination of differing settings."""
    of_kind = [record for record in records if record.kind == kind]
    flat = [dotted(record.settings) for record in of_kind]
    varied = {*varying(flat)} - SAME
    alike: dict[tuple[int, str, str], list[AttackResult]] = {}
    most = max((r.times for record in of_kind for r in record.results if r.item == item), default=0)
    for record, settings in zip(of_kind, flat, strict=True):
        apart = values(differences(settings, usual, sorted(settings)))
        unusual = {k: v for k, v in apart.items() if k in varied and not isinstance(v, list)}
        frame = ", ".join(
            f"{key}={apart[key]}"
            for key in FRAME
            if key in apart and key not in varied and key in usual
        )
        for result in record.results:
            whatever = kind == "style-inversion" and not result.perceptual
            measured = figure in result.figures or not result.figures
            if result.item == item and measured and (whatever or result.about == about):
                said = assignments(unusual)
                if result.times < most:
                    said.append(f"messages of {result.times} of {most} rounds")
                alike.setdefault((record.images, ", ".join(said), frame), []).append(result)
    for (images, how, frame), results in sorted(alike.items()):
        there = [r.figures[figure] for r in results if figure in r.figures]
        size = max(result.bytes for result in results)
        yield Found(images, size, how, frame, overall(there) if there else None, len(there))


class Of(NamedTuple):
    """The attacks and runs of one data set and recipe."""

    attacks: list[AttackRecord]
    runs: list[RecordedRun]


def frames_of(
    records: Iterable[AttackRecord], runs: Iterable[RecordedRun] = ()
) -> dict[tuple[str, str], Of]:
    """Return records of attacks, and runs with a guarantee, by data set and recipe."""
    found: dict[tuple[str, str], Of] = {}
    for record in records:
        found.setdefault((record.dataset, record.recipe), Of([], [])).attacks.append(record)
    for run in runs:
        if run.privacy:
            found.setdefault((run.dataset, run.recipe), Of([], [])).runs.append(run)
    return dict(sorted(found.items()))


def privacy_text(methods: Mapping[str, type[Method]], records: Sequence[AttackRecord]) -> str:
    """Return the table ``privacy`` as Markdown: what attacks reach on each message, in short.

    It shows runs with the usual settings, for each attack those of the smallest clients. All else
    is in `privacy_notes`.
    """
    lines = ["# What attacks make of clients' messages", ""]
    for (dataset, recipe), (attacks, _) in frames_of(records).items():
        reached: dict[tuple[str, ...], list[str]] = {}
        for row in exposures(methods, attacks):
            usual = [[f for f in row.found[head] if not f.how] for head in IN_SHORT]
            if any(usual):
                cells = (_reached(found) for found in usual)
                reached.setdefault((row.item, *cells), []).append(method_title(row.method))
        rows = [(", ".join(names), *cells) for cells, names in reached.items()]
        lines += [f"## {dataset_title(dataset)}, recipe {recipe}", ""]
        lines += [*_table(("method", "sends", *IN_SHORT), rows), ""]
    lines += [
        "Means over scenarios and seeds, of the smallest clients attacked; 0.5 is chance, 1 is "
        "all. Withheld: a control failed. -: not attacked; `feddg-bench attack --method METHOD "
        "--kind all` does.",
        "",
        "[Notes](privacy.notes.md)",
        "",
    ]
    return "\n".join(lines)


def _reached(found: Sequence[Found]) -> str:
    """Return the mean that an attack reaches on the smallest clients."""
    if not found:
        return "-"
    interval = min(found, key=lambda f: f.images).interval
    return "withheld" if interval is None else f"{interval.value:.2f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    every = (heads, ["---"] * len(heads), *rows)
    return [f"| {' | '.join(cells)} |" for cells in every]


def privacy_notes(
    methods: Mapping[str, type[Method]],
    records: Sequence[AttackRecord],
    runs: Sequence[RecordedRun] = (),
) -> str:
    """Return the notes of the table ``privacy``: one row for each item that a method sends.

    Where settings were varied, each combination has its own row. A figure that no attack measured
    has no column.
    """
    lines = ["# Notes on the table privacy", ""]
    first = ["method", "sends", "bytes", "secure sums", "dp_client", "dp_style"]
    frames = frames_of(records, runs) or {("no data set", "none"): Of([], [])}
    for (dataset, recipe), of in frames.items():
        rows = list(exposures(methods, *of))
        measured = [head for head in MEASURED if any(row.found[head] for row in rows)]
        heads = [*first, *measured, *([EPSILON] if any(row.guarantees for row in rows) else [])]
        table: list[list[str]] = []
        for row in rows:
            possible = ["no" if why else "yes" for why in (row.secure, row.client, row.style)]
            hows = sorted({f.how for head in measured for f in row.found[head]}) or [""]
            for how in hows:
                cells = [
                    "; ".join(f.text for f in row.found[head] if f.how == how) for head in measured
                ]
                if EPSILON in heads:
                    guarantees = row.guarantees if how == hows[0] else ()
                    cells.append("; ".join(g.text for g in guarantees))
                item = f"{row.item} ({how})" if how else row.item
                own = [method_title(row.method), item, _bytes(row, how), *possible]
                table.append(own + [cell or "-" for cell in cells])
        lines += [f"## {dataset_title(dataset)}, recipe {recipe}", "", *_table(heads, table), ""]
        lines += _other_frames(rows, measured)
    lines += [
        "The server sees single replies, unless sums are secure. n: images of a client. AUC and "
        "ranks: 0.5 is chance, 1 is all; means over scenarios and seeds, with the range of their "
        "95 % bootstrap intervals. Epsilon at: what differential privacy guarantees, and the key "
        "metric on test after the last round. Withheld: a control failed. -: not attacked; "
        "`feddg-bench attack --method METHOD --kind all` does. `feddg-bench methods show METHOD` "
        "says why a protection is not possible.",
        "",
    ]
    return "\n".join(lines)


def _bytes(row: Exposure, how: str) -> str:
    """Return a message's bytes as text, in the recipe's frame if it was attacked there."""
    alike = [f for found in row.found.values() for f in found if f.how == how]
    own = [f for f in alike if not f.frame]
    size = f"{max(f.bytes for f in own or alike):,}" if alike else "-"
    return size if own or not alike else f"{size} (another frame)"


def _other_frames(rows: Sequence[Exposure], heads: Sequence[str]) -> list[str]:
    """Return a sentence for each kind of attack made in a frame other than the recipe's."""
    frames = {
        f"Not the recipe's: `{head.partition(',')[0]}` is of runs with {f.frame}."
        for row in rows
        for head in heads
        for f in row.found[head]
        if f.frame
    }
    return [*sorted(frames), ""] if frames else []


def privacy_csv(
    methods: Mapping[str, type[Method]],
    records: Sequence[AttackRecord],
    runs: Sequence[RecordedRun] = (),
) -> str:
    """Return the table ``privacy`` as CSV, one row per figure."""
    head = ("dataset", "recipe", "method", "item", "figure", "images", "settings")
    rows: list[tuple[Any, ...]] = []
    for frame, of in frames_of(records, runs).items():
        for row in exposures(methods, *of):
            own = (*frame, row.method, row.item)
            for g in row.guarantees:
                said = f"epsilon {g.epsilon:.6g}, delta {g.delta:g}"
                rows.append((*own, EPSILON, None, said, g.value, None, None, g.runs))
            for name, found in row.found.items():
                for f in found:
                    i = f.interval
                    values = (i and i.value, i and i.low, i and i.high)
                    rows.append((*own, name, f.images, f.settings, *values, f.runs))
    return csv_lines((*head, "value", "low", "high", "runs"), rows)


def measured_text(name: str, method: type[Method], records: Sequence[AttackRecord]) -> str:
    """Return the measurements of a card: a line for each attacked item and figure."""
    measured = []
    for (dataset, recipe), of in frames_of(records).items():
        for row in exposures({name: method}, *of):
            for head, found in row.found.items():
                texts = "; ".join(f.text + (f.settings and f" with {f.settings}") for f in found)
                if texts:
                    where = f"{dataset_title(dataset)}, recipe {recipe}"
                    measured.append(f"- {where}: {head} from `{row.item}`: {texts}.")
    measured = measured or [f"- Nothing is measured yet: `feddg-bench attack --method {name}`."]
    return "".join(f"{line}\n" for line in measured)
