"""What clients send and what attacks learn from it, for method cards and the table ``privacy``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from feddg_attacks.records import AttackRecord, AttackResult, overall
from feddg_bench.analysis.sheets import csv_lines
from feddg_bench.analysis.tables.grid import Grid, text_grid
from feddg_bench.analysis.tables.setups import usual_settings
from feddg_bench.analysis.tables.writers import document
from feddg_bench.common.titles import counted
from feddg_bench.config.layers import dotted
from feddg_bench.plugins import dataset_title, method_title
from feddg_bench.protection.possible import Sent, sent_by
from feddg_bench.records.differences import assignments, differences, values, varying
from feddg_bench.records.record import rounded_up
from feddg_bench.records.runs import RecordedRun, key_metric

if TYPE_CHECKING:
    from feddg_bench.outlines import Outline

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
"""Dotted keys of the settings in which the runs of one cell can differ."""

FRAME = ("backbone.name", "data.image_size")
"""Dotted keys of settings that define what is attacked; a kind of attack can set its own."""


class Measurement(NamedTuple):
    """A figure of one item that a method's clients send, over records that differ only in `SAME`.

    Such records can differ in scenario and seed. A guarantee is also a figure; it has no images.
    """

    method: str
    sent: Sent
    head: str  # of a column: one of `MEASURED`, or `EPSILON`
    images: int | None  # of a client
    bytes: int  # of its message
    how: str  # settings that vary between records and differ from the usual ones here
    frame: str  # settings of `FRAME` common to all attacks of the kind, unlike the recipe's
    settings: str  # both, or the guarantee
    numbers: tuple[float | None, float | None, float | None]  # value and interval; none: withheld
    runs: int
    text: str  # for a cell


def measurements(
    methods: Mapping[str, Outline],
    records: Iterable[AttackRecord],
    runs: Sequence[RecordedRun] = (),
) -> Iterator[Measurement]:
    """Yield the figures of the server's attacks on each item that clients send, and guarantees.

    ``records`` and ``runs`` must be of one data set and recipe.
    """
    by_server = [record for record in records if record.attacker == "server"]
    for name, method in methods.items():
        attacks = [record for record in by_server if record.method == name]
        usual = (attacks and usual_settings(attacks[0].recipe, attacks[0].dataset, name)) or {}
        flat = [dotted(record.settings) for record in attacks]
        apart = [values(differences(settings, usual, sorted(settings))) for settings in flat]
        own = list(zip(attacks, flat, apart, strict=True))
        done = [run for run in runs if run.method == name]
        for sent in sent_by(method.uplink):
            yield from _guarantees(done, name, sent)
            for head in MEASURED:
                yield from _measured(own, usual, name, sent, head)


def _guarantees(runs: Sequence[RecordedRun], method: str, sent: Sent) -> Iterator[Measurement]:
    """Yield a guarantee per set of runs that differ only in scenario and seed, strictest first.

    Runs of another protocol, version or data form their own sets. A guarantee is the largest
    epsilon of a set, with the mean key metric on test; a cell shows epsilon rounded up.
    """
    mechanism = "dp_client" if sent.name == "weights" else "dp_style"
    sets: dict[tuple[str, float, int], list[tuple[float, float]]] = {}
    for run in runs:
        p, s = run.privacy, run.settings
        if p is None or p.mechanism != mechanism or p.epsilon is None or p.delta is None:
            continue
        value = key_metric(run, run.evaluation("last"), "test")
        # With `dp_style`, the text of `protects` names the items that were sent.
        if value is not None and (mechanism == "dp_client" or sent.name in str(p.protects)):
            frame = run.protocol, run.version, run.fingerprint, sorted(s.items())
            alike = (repr(frame), p.delta, s["partition.clients"])
            sets.setdefault(alike, []).append((p.epsilon, value))
    for (_, delta, clients), of in sorted(sets.items(), key=lambda pair: max(pair[1])[0]):
        epsilon, mean = max(of)[0], statistics.mean(value for _, value in of)
        shown = f"{rounded_up(epsilon)} at {mean:.1f}"
        yield Measurement(
            method=method,
            sent=sent,
            head=EPSILON,
            images=None,
            bytes=0,
            how="",
            frame="",
            settings=f"epsilon {epsilon:.6g}, delta {delta:g}",
            numbers=(mean, None, None),
            runs=len(of),
            text=f"{shown} (delta {delta:g}, N = {clients}, {counted(len(of), 'run')})",
        )


def _measured(
    records: Sequence[tuple[AttackRecord, Mapping[str, Any], Mapping[str, Any]]],
    usual: Mapping[str, Any],
    method: str,
    sent: Sent,
    head: str,
) -> Iterator[Measurement]:
    """Yield one figure for each client size and each combination of differing settings.

    ``records`` come with their settings by dotted key, and those that are not ``usual``.
    """
    item, (kind, about, figure) = sent.name, MEASURED[head]
    of_kind = [(record, apart) for record, _, apart in records if record.kind == kind]
    varied = {*varying(settings for record, settings, _ in records if record.kind == kind)} - SAME
    alike: dict[tuple[int, str, str], list[AttackResult]] = {}
    most = max(
        (r.times for record, _ in of_kind for r in record.results if r.item == item), default=0
    )
    for record, apart in of_kind:
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
                remarks = assignments(unusual)
                if result.times < most:
                    remarks.append(f"messages of {result.times} of {most} rounds")
                alike.setdefault((record.images, ", ".join(remarks), frame), []).append(result)
    for (images, how, frame), results in sorted(alike.items()):
        intervals = [r.figures[figure] for r in results if figure in r.figures]
        size = max(result.bytes for result in results)
        mean = overall(intervals) if intervals else None
        shown = "withheld" if mean is None else mean.text
        yield Measurement(
            method=method,
            sent=sent,
            head=head,
            images=images,
            bytes=size,
            how=how,
            frame=frame,
            settings=", ".join(filter(None, (how, frame))),
            numbers=(None, None, None) if mean is None else (mean.value, mean.low, mean.high),
            runs=len(intervals),
            text=f"{shown} (n = {images})",
        )


class Of(NamedTuple):
    """The attacks and runs of one data set and recipe."""

    attacks: list[AttackRecord]
    runs: list[RecordedRun]


def frames_of(
    records: Iterable[AttackRecord], runs: Iterable[RecordedRun] = ()
) -> dict[tuple[str, str], Of]:
    """Return records of attacks, and runs with a guarantee, by data set and recipe."""
    frames: dict[tuple[str, str], Of] = {}
    for record in records:
        frames.setdefault((record.dataset, record.recipe), Of([], [])).attacks.append(record)
    for run in runs:
        if run.privacy:
            frames.setdefault((run.dataset, run.recipe), Of([], [])).runs.append(run)
    return dict(sorted(frames.items()))


def privacy_grids(
    methods: Mapping[str, Outline], records: Sequence[AttackRecord]
) -> Iterator[Grid]:
    """Yield a short grid of what attacks reach on each message, for each data set and recipe.

    It covers runs with the usual settings and, for each attack, the smallest clients.
    `notes_grids` has the rest.
    """
    for (dataset, recipe), (attacks, _) in frames_of(records).items():
        reached: dict[tuple[str, ...], list[str]] = {}
        usual = (f for f in measurements(methods, attacks) if f.head in IN_SHORT and not f.how)
        for (name, sent), each in groupby(usual, lambda f: (f.method, f.sent)):
            of = list(each)
            cells = (_reached([f for f in of if f.head == head]) for head in IN_SHORT)
            reached.setdefault((sent.name, *cells), []).append(method_title(name))
        rows = ((", ".join(names), *cells) for cells, names in reached.items())
        yield text_grid(f"{dataset_title(dataset)}, recipe {recipe}", ("sends", *IN_SHORT), rows)


def privacy_text(methods: Mapping[str, Outline], records: Sequence[AttackRecord]) -> str:
    """Return the table ``privacy`` as Markdown."""
    end = (
        "Means over scenarios and seeds, for the smallest clients attacked; 0.5 is chance, 1 is "
        "perfect. Withheld: a control failed. -: not attacked, see `feddg-bench attack --method "
        "METHOD --kind all`.\n\n[Notes](privacy.notes.md)"
    )
    grids = privacy_grids(methods, records)
    return document("Attacks on clients' messages", "", grids, end)


def _reached(measured: Sequence[Measurement]) -> str:
    """Return the mean that an attack reaches on the smallest clients."""
    if not measured:
        return "-"
    value = min(measured, key=lambda f: f.images or 0).numbers[0]
    return "withheld" if value is None else f"{value:.2f}"


def notes_grids(
    methods: Mapping[str, Outline], records: Sequence[AttackRecord], runs: Sequence[RecordedRun]
) -> Iterator[Grid]:
    """Yield a grid for each data set and recipe, with a row for each item that a method sends.

    Each combination of varied settings has its own row. A figure that no attack measured has no
    column.
    """
    frames = frames_of(records, runs) or {("no data set", "none"): Of([], [])}
    for (dataset, recipe), of in frames.items():
        measured = list(measurements(methods, *of))
        seen = {figure.head for figure in measured}
        shown = [head for head in (*MEASURED, EPSILON) if head in seen]
        rows: list[list[str]] = []
        for name, sent in ((n, s) for n, method in methods.items() for s in sent_by(method.uplink)):
            why = methods[name].obstacles
            possible = ["no" if why[key] else "yes" for key in ("secure", "dp_client", "dp_style")]
            own = [f for f in measured if (f.method, f.sent) == (name, sent)]
            hows = sorted({f.how for f in own if f.head != EPSILON}) or [""]
            for how in hows:
                alike = [f for f in own if f.head != EPSILON and f.how == how]
                shown_here = alike + [f for f in own if f.head == EPSILON and how == hows[0]]
                cells = ["; ".join(f.text for f in shown_here if f.head == head) for head in shown]
                item = f"{sent.name} ({how})" if how else sent.name
                line = [method_title(name), item, _bytes(alike), *possible]
                rows.append(line + [cell or "-" for cell in cells])
        heads = ["sends", "bytes", "secure sums", "dp_client", "dp_style", *shown]
        title = f"{dataset_title(dataset)}, recipe {recipe}"
        yield text_grid(title, heads, rows, _other_frames(measured))


def privacy_notes(
    methods: Mapping[str, Outline],
    records: Sequence[AttackRecord],
    runs: Sequence[RecordedRun] = (),
) -> str:
    """Return the notes of the table ``privacy``, as Markdown."""
    end = (
        "The server sees each client's reply unless sums are secure. n: images per client. AUC and "
        "ranks: 0.5 is chance, 1 is perfect; means over scenarios and seeds, with the range of "
        "their 95 % bootstrap intervals. Epsilon at: guarantee of differential privacy, and the "
        "key metric on test after the last round. Withheld: a control failed. -: not attacked, see "
        "`feddg-bench attack --method METHOD --kind all`. `feddg-bench methods show METHOD` gives "
        "the reason if a protection is not possible."
    )
    return document("Notes on the table privacy", "", notes_grids(methods, records, runs), end)


def _bytes(alike: Sequence[Measurement]) -> str:
    """Return a message's bytes as text, in the recipe's setup if it was attacked there."""
    own = [f for f in alike if not f.frame]
    size = f"{max(f.bytes for f in own or alike):,}" if alike else "-"
    return size if own or not alike else f"{size} (another setup)"


def _other_frames(measured: Iterable[Measurement]) -> list[str]:
    """Return a sentence for each kind of attack made in a setup other than the recipe's."""
    said = {
        f"Other settings than the recipe's: `{f.head.partition(',')[0]}` has runs with {f.frame}."
        for f in measured
        if f.frame
    }
    return sorted(said)


def privacy_csv(
    methods: Mapping[str, Outline],
    records: Sequence[AttackRecord],
    runs: Sequence[RecordedRun] = (),
) -> str:
    """Return the table ``privacy`` as CSV, one row per figure."""
    head = ("dataset", "recipe", "method", "item", "figure", "images", "settings")
    rows: list[tuple[Any, ...]] = []
    for frame, of in frames_of(records, runs).items():
        rows += [
            (*frame, f.method, f.sent.name, f.head, f.images, f.settings, *f.numbers, f.runs)
            for f in measurements(methods, *of)
        ]
    return csv_lines((*head, "value", "low", "high", "runs"), rows)


def measured_text(name: str, method: Outline, records: Sequence[AttackRecord]) -> str:
    """Return the measurements of a card: a line for each attacked item and figure."""
    measured = []
    for (dataset, recipe), of in frames_of(records).items():
        each = measurements({name: method}, *of)
        for (sent, head), figures in groupby(each, lambda f: (f.sent, f.head)):
            texts = "; ".join(f.text + (f.settings and f" with {f.settings}") for f in figures)
            where = f"{dataset_title(dataset)}, recipe {recipe}"
            measured.append(f"- {where}: {head} from `{sent.name}`: {texts}.")
    measured = measured or [f"- Nothing is measured yet: `feddg-bench attack --method {name}`."]
    return "".join(f"{line}\n" for line in measured)
