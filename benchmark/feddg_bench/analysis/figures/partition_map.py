"""Heat maps of partitions: numbers of images by client and domain, or by client and class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from feddg_bench.analysis.figures.drawing import Picture, layout, new_figure
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import file_name
from feddg_bench.common.titles import counted, domain_title
from feddg_bench.data.protocols import TITLES

if TYPE_CHECKING:
    from feddg_bench.runs.request import Plan
    from feddg_bench.runs.setup import RunData

By = Literal["domain", "label"]
FEW = 24
"""Up to this many clients, each cell shows its number."""
_MANY = 40
"""With more rows than this, rows are not labelled individually."""
_LAMBDA = ("heterogeneity", "\N{GREEK SMALL LETTER LAMDA}")
_ALPHA = ("alpha", "\N{GREEK SMALL LETTER ALPHA}")
RULE_SETTINGS = {
    "heterogeneous": (_LAMBDA,),
    "dirichlet": (_ALPHA,),
    "label_dirichlet": (_LAMBDA, _ALPHA),
    "label_shards": (_LAMBDA, ("classes_per_client", "classes per client")),
}
"""Kind of partition -> the settings that a panel names, each with its symbol."""


def partition_picture(plans: Sequence[Plan], data: RunData, by: By) -> Picture:
    """Draw the partitions of plans that differ only in the partition, made as in a run.

    Raises:
        DataError: If the data set is missing or incomplete.
        SettingsError: If the images cannot be partitioned this way, or have no classes to count by.
    """
    from feddg_bench.runs.setup import open_federation

    first, dataset = plans[0], plans[0].dataset
    if by == "label" and dataset.task != "classification":
        raise SettingsError(f"{dataset.title} has no classes: use --by domain")
    spreads, rows = {}, tuple[str, ...]()
    for plan in plans:
        federation = open_federation(plan, data)[0]
        values = federation.domain_ids if by == "domain" else federation.labels
        rows = federation.sources if by == "domain" else dataset.classes
        counts = [
            np.bincount(values[index], minlength=len(rows)) for index in federation.clients.values()
        ]
        spreads[_label(plan)] = np.stack(counts, axis=1)
    s = first.settings
    n = max(counts.shape[1] for counts in spreads.values())
    name = f"partition-{s.dataset}-{s.protocol}-{first.scenario.name}-{s.partition.kind}-{n}"
    name += "-by_label" if by == "label" else ""
    protocol = TITLES.get(s.protocol, s.protocol)
    title = f"{dataset.title}, {protocol}, scenario {first.scenario.name}, seed {s.seed}"
    said = f"training images of {counted(n, 'client')}, partition {s.partition.kind}"
    return heat_maps(file_name(name), f"{title}: {said}", rows, spreads, by)


def _label(plan: Plan) -> str:
    partition = plan.settings.partition
    named = RULE_SETTINGS.get(partition.kind, ())
    said = ", ".join(f"{symbol} = {getattr(partition, key):g}" for key, symbol in named)
    return said or partition.kind


def heat_maps(
    name: str, title: str, rows: Sequence[str], spreads: Mapping[str, NDArray[np.int64]], by: By
) -> Picture:
    """Draw partitions one below the other, all on one grey scale.

    ``spreads`` maps each partition's label to its numbers of images by row and client, [R, N].
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    most = max(int(counts.max()) for counts in spreads.values())
    clients = max(counts.shape[1] for counts in spreads.values())
    named = len(rows) <= _MANY
    titles = [domain_title(row) if by == "domain" else row for row in rows]
    height = max(0.5, (0.19 if named else 0.04) * len(rows))
    figure = new_figure(7.2, 0.9 + (height + 0.35) * len(spreads))
    grid = figure.subplots(len(spreads), 1, sharex=True, squeeze=False)[:, 0]
    scale = Normalize(0, most)
    for axes, (label, counts) in zip(grid, spreads.items(), strict=True):
        axes.pcolormesh(
            np.arange(counts.shape[1] + 1) - 0.5,
            np.arange(len(rows) + 1) - 0.5,
            counts,
            cmap="Greys",
            norm=scale,
            edgecolors="#d0d0d0" if clients <= 100 else "none",
            linewidth=0.3,
            rasterized=clients * len(rows) > 2000,  # else a PDF holds a path for each cell
        )
        if clients <= FEW:
            _say_numbers(axes, counts, most)
        axes.invert_yaxis()
        axes.set_yticks(range(len(rows)) if named else [], labels=titles if named else [])
        axes.tick_params(length=0)
        pure = np.mean((counts > 0).sum(axis=0) == 1)
        kind = {"domain": "domain", "label": "class"}[by]
        axes.set_title(f"{label}: {100 * pure:.0f} % of clients hold a single {kind}", loc="left")
        axes.spines[:].set_visible(True)
    if not named:
        grid[len(grid) // 2].set_ylabel(f"{len(rows)} {'domains' if by == 'domain' else 'classes'}")
    grid[-1].set_xlabel("client")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    mappable = ScalarMappable(scale, cmap="Greys")
    whole = MaxNLocator(integer=True, nbins=8)
    figure.colorbar(mappable, ax=list(grid), label="images", fraction=0.03, pad=0.01, ticks=whole)
    held = [
        (label, client, row, int(counts[n, client]))
        for label, counts in spreads.items()
        for client in range(counts.shape[1])
        for n, row in enumerate(rows)
        if counts[n, client]  # with thousands of clients most are zeros
    ]
    numbers = pd.DataFrame(held, columns=["partition", "client", by, "images"])
    return layout(name, figure, title, numbers=numbers)


def _say_numbers(axes: Any, counts: NDArray[np.int64], most: int) -> None:
    for (row, client), count in np.ndenumerate(counts):
        if count:
            ink = "white" if count > 0.55 * most else "black"
            axes.text(client, row, int(count), ha="center", va="center", color=ink, fontsize=6)
