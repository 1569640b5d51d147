"""``feddg-bench data download``: fetch a data set or a style network, and check it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.data import check_and_report
from feddg_bench.common.errors import DataError, RunInterruptedError, SettingsError, unknown
from feddg_bench.common.files import absolute
from feddg_bench.common.terminal import Display, say, text
from feddg_bench.config.reading import known_name
from feddg_bench.plugins import load_dataset, names


def download_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="See `feddg-bench data list`; or vgg19, vgg19_16x: AdaIN's network.",
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder; default NAME in the data folder, or weights for a network."
        ),
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Fetch from this folder of a server; may be repeated."),
    ] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="I keep to a licence for research only.")
    ] = False,
) -> None:
    """Download a data set or a style network where its licence lets us.

    Stopped, the same command goes on. The data folder is $FEDDG_DATA, that of the settings file, or
    ~/.local/share/feddg-bench. Files are checked before they are used; then a data set is examined
    as by `data check`, and the checkpoints of a network become one .safetensors file.
    """
    from feddg_bench.data.dataset import DomainDataset
    from feddg_bench.data.fetch.obtain import check_offer, obtain
    from feddg_bench.data.fetch.style_networks import WEIGHTS, WeightsDownload, obtain_weights
    from feddg_bench.data.locations import data_home, remember_root

    known = names("data set")
    name = known_name(name, [*known, *WEIGHTS])
    if name not in (*known, *WEIGHTS):
        raise SettingsError(unknown("data set or style network", name, [*known, *WEIGHTS]))
    offer: type[DomainDataset] | WeightsDownload
    if name in known:
        offer = load_dataset(name)
        check_offer(offer, accept_licence)
        get, home, size = partial(obtain, offer), offer.name, offer.archive_bytes
    else:
        offer = WEIGHTS[name]
        get, home, size = partial(obtain_weights, offer), "weights", None
    folder = absolute(to or data_home() / home)
    about = "" if size is None else f", about {size / 1e6:,.0f} MB"
    say(f"{offer.title}{about}; licence: {offer.licence}\nsource: {offer.source}\nto: {folder}")
    with _bars(offer.source) as show:
        notes = get(folder, mirror or (), show)
    say("\n".join(notes))
    if isinstance(offer, WeightsDownload):
        say(f"use it: hyper.style={name} hyper.style_weights={folder / offer.file}")
        return
    clean = check_and_report(offer(folder))
    say(f"noted in {remember_root(folder, offer.name)}")
    if not clean:
        raise typer.Exit(1)


@contextmanager
def _bars(source: str) -> Iterator[Callable[[str, str], Callable[[int, int], None]]]:
    """Show amount, speed and time left of one step after another, if on a terminal.

    A failure names the ``source``; after a stop, the message says how to go on.
    """
    try:
        with _progress() as show:
            yield show
    except DataError as error:
        raise DataError(f"{error}; by hand: {source}") from error
    except RunInterruptedError as stop:
        print("feddg-bench: stopped; the same command goes on where this one was", file=sys.stderr)
        raise typer.Exit(128 + stop.signal_number) from stop


@contextmanager
def _progress() -> Iterator[Callable[[str, str], Callable[[int, int], None]]]:
    from rich.progress import TimeRemainingColumn

    with Display(text("{task.fields[amount]}"), TimeRemainingColumn()) as display:
        progress = display.progress

        def show(name: str, unit: str) -> Callable[[int, int], None]:
            for done in progress.task_ids:
                progress.update(done, visible=False)
            task = progress.add_task(name, total=None, amount="")

            def update(done: int, total: int) -> None:
                if unit == "bytes":
                    speed = progress.tasks[task].speed or 0.0
                    amount = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {speed / 1e6:,.1f} MB/s"
                else:
                    amount = f"{done:,} of {total:,} {unit}"
                progress.update(task, completed=done, total=total, amount=amount)

            return update

        yield show
