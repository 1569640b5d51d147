"""Papers' tables of pictures generated from styles, made from records of attacks.

None of our setups is that of the papers (a generator of FastGAN's size, public images of
Tiny-ImageNet), so no difference is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from feddg_attacks.records import AttackRecord, AttackResult, Interval, overall
from feddg_bench.analysis.tables.captions import ABBREVIATIONS
from feddg_bench.analysis.tables.columns import Column, MeasuredColumn
from feddg_bench.analysis.tables.describe import ColumnSpec
from feddg_bench.analysis.tables.grid import Entry, Grid, Line
from feddg_bench.common.titles import domain_title
from feddg_bench.records.published import published_number

DATASET, METHOD, KIND, ITEM = "pacs", "pardon", "style-inversion", "style"
DOMAINS: Mapping[str, str] = {
    "photo": "pa-s-c",
    "art_painting": "pa-s-c",
    "cartoon": "cs-a-p",
    "sketch": "cs-a-p",
}
"""Domain of a row -> a scenario that trains on it."""
HEADS: Mapping[str, str] = {
    "fid": "FID",
    "inception_score": "IS",
    "lpips": "LPIPS",
    "psnr": "PSNR dB",
}
SCORES = (
    "FID grows when pictures are few; what the papers print as Inception Scores of drawn pictures "
    "is below 1, which the exponential of a divergence cannot be."
)


@dataclass(frozen=True)
class Place:
    """Content of a column."""

    group: str
    metric: str
    figure: str  # of an attack's result
    setting: str  # of the published number
    attacker: str = "server"
    trained: bool = False  # whether the generator was trained on LPIPS


@dataclass(frozen=True)
class Design:
    """Layout of one of these tables."""

    title: str
    paper: str
    table: str
    places: tuple[Place, ...]
    notes: tuple[str, ...]


def _attacks() -> Iterator[Place]:
    for number, attacker in (("i", "server"), ("ii", "client")):
        for share, form in (("sample", "sample_{}"), ("client", "{}")):
            for metric in HEADS:
                yield Place(
                    f"attack {number.upper()}, {share} style",
                    metric,
                    form.format(metric),
                    f"attack={number};share={share}_style",
                    attacker,
                )


OWN_FRAME = (
    "The setup is ours, not the paper's, so that no difference from the published number below a "
    "row is printed."
)
"""Note below every such table."""

DESIGNS: Mapping[str, Design] = {
    "pardon-4": Design(
        "PARDON, Table IV: pictures drawn from styles on PACS",
        "pardon",
        "4",
        tuple(_attacks()),
        (
            "Attack I is by the server. Attack II is by another client; here a client "
            "receives only the server's style, which belongs to no client.",
            SCORES,
        ),
    ),
    "fisc-9": Design(
        "FISC, Table 9: pictures drawn from clients' styles on PACS",
        "fisc",
        "9",
        (
            Place("real images", "inception_score", "true_inception_score", "real_images"),
            *(
                Place(f"trained on {loss}", metric, metric, f"style2image_{name}", trained=trained)
                for loss, name, trained in (("MSE", "mse", False), ("LPIPS", "lpips", True))
                for metric in HEADS
            ),
            Place("from images", "fid", "fid_of_images", "baseline_gan"),
        ),
        (
            "From images: the same generator on images of 8 x 8 pixels, where FISC trains a GAN. "
            "Ours trains on LPIPS and the mean squared error together.",
            SCORES,
        ),
    ),
}


def reconstruction_grid(name: str, records: Iterable[AttackRecord]) -> Grid:
    """Return one of the `DESIGNS`, filled with its numbers."""
    design = DESIGNS[name]
    fitting = [
        r for r in records if (r.dataset, r.method, r.kind) == (DATASET, METHOD, KIND) and r.results
    ]
    columns = tuple(
        Column(
            place.group,
            HEADS[place.metric],
            "measured",
            (
                MeasuredColumn(
                    number, 0, ColumnSpec(head=place.metric), {}, {}, None, place.metric, "last"
                ),
            ),
            {},
            2,
        )
        for number, place in enumerate(design.places)
    )
    setup, of_setup = max(
        _frames(fitting).items(), key=lambda pair: len(pair[1]), default=("", list[AttackRecord]())
    )
    lines: list[Line] = []
    fills: list[tuple[str, str]] = []
    runs: dict[str, dict[str, tuple[str, ...]]] = {}
    for domain, scenario in DOMAINS.items():
        fill = (
            f"feddg-bench attack --kind {KIND} --method {METHOD} --dataset {DATASET} --recipe "
            f"laptop --scenario {scenario} --lpips SQUEEZENET --inception INCEPTION"
        )
        of = [r for r in of_setup if any(result.by_domain.get(domain) for result in r.results)]
        row = domain_title(domain)
        entries = tuple(_entry(place, domain, of, fill) for place in design.places)
        lines.append(Line("ours", row, row, entries, {"dataset": DATASET, "method": METHOD}))
        if any(entry.fill for entry in entries):
            fills.append((row, fill))
        for record in of:
            kept = runs.setdefault(row, {}).get(record.scenario, ())
            runs[row][record.scenario] = (*kept, f"{record.seed}:{record.key}")
        published = tuple(_published(design, place, domain) for place in design.places)
        lines.append(Line("published", row, "published", published))
    return Grid(
        name=name,
        title=design.title,
        caption=f"PACS, {METHOD.upper()}: means over runs, with the range of their 95 % intervals. "
        f"Our setup: {setup or 'no records yet'}, not the paper's.",
        columns=columns,
        lines=tuple(lines),
        notes=(
            "Sample: from the style of a single image; client: from that of all its images.",
            f"`feddg-bench attack --kind {KIND}`.",
            ABBREVIATIONS,
            OWN_FRAME,
            *design.notes,
        ),
        fills=tuple(fills),
        runs=runs,
    )


def _frames(records: Iterable[AttackRecord]) -> dict[str, list[AttackRecord]]:
    """Return records by setup: a label of recipe, style and image size."""
    by_setup: dict[str, list[AttackRecord]] = {}
    for record in records:
        settings = record.settings
        side, style = settings["data"]["image_size"], settings["hyper"].get("style", "")
        shown = f"{record.recipe}, {style}, {side} px"
        by_setup.setdefault(shown, []).append(record)
    return by_setup


def _entry(place: Place, domain: str, records: Sequence[AttackRecord], fill: str) -> Entry:
    measured: list[tuple[AttackRecord, Interval]] = []
    for record in records:
        for result in record.results if record.attacker == place.attacker else ():
            figures = result.by_domain.get(domain, {})
            if _fits(result, place) and place.figure in figures:
                measured.append((record, figures[place.figure]))
    if not measured:
        return Entry(None, fill=fill if place.attacker == "server" else "")
    mean = overall([interval for _, interval in measured])
    return Entry(
        mean.value,
        mean.text,
        seeds=tuple(sorted({record.seed for record, _ in measured})),
        low=mean.low,
        high=mean.high,
        keys=tuple(record.key for record, _ in measured),
    )


def _fits(result: AttackResult, place: Place) -> bool:
    return result.item == ITEM and result.perceptual == place.trained


def _published(design: Design, place: Place, domain: str) -> Entry | None:
    where = {"domain": domain, "setting": place.setting, "metric": place.metric}
    number = published_number(design.paper, design.table, where)
    return (
        None if number is None else Entry(number.value, f"{number.value:g}", source=number.source)
    )
