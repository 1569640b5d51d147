"""``feddg-bench data``: download, list, check, decode, show and locate data sets."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddg_bench.cli import complete
from feddg_bench.cli.options import (
    CacheDir,
    DataRoot,
    Dataset,
    Json,
    each_usable,
    print_json,
    stopped,
)
from feddg_bench.common.errors import (
    DataError,
    RunInterruptedError,
    SettingsError,
    printable,
    unknown,
)
from feddg_bench.common.files import absolute, replacing
from feddg_bench.common.terminal import Display, say, terminal, text, text_table
from feddg_bench.common.titles import counted
from feddg_bench.config.reading import known_name
from feddg_bench.config.schema import DataSettings
from feddg_bench.config.settle import recipe_layers, settle
from feddg_bench.plugins import load_dataset, make_dataset, names, plugin_name

if TYPE_CHECKING:
    from rich.progress import Progress

    from feddg_bench.data.dataset import DomainDataset
    from feddg_bench.data.inspect.doctor import Diagnosis

logger = logging.getLogger(__name__)

data_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, check, decode, show and locate data sets.",
)


@data_app.command("list")
def list_command(
    data_root: DataRoot = None, cache_dir: CacheDir = None, json_: Json = False
) -> None:
    """List the data sets and whether they are on this machine."""
    from feddg_bench.common.files import cache_dir as find_cache
    from feddg_bench.data.locations import check_root

    check_root(data_root)
    cache = find_cache(cache_dir)
    rows = list(each_usable("data set", lambda name: _row(name, data_root, cache)))
    if json_:
        print_json(rows)
        return

    columns = ("data set", "images", "domains", "classes", "download", "here", "decoded")
    drawn = text_table("", columns, map(_counts, rows), right=columns[1:5], whole=columns[:1])
    terminal().print(drawn, highlight=False)
    for row in rows:
        how = f"; or: feddg-bench data download {row['name']}" if row["download"] else ""
        where = row["folder"] or ("" if row["here"] else f"{row['source']}{how}")
        if where:
            terminal().print(f"{row['name']}: {where}", highlight=False)


def _counts(row: dict[str, Any]) -> tuple[str, ...]:
    """Return one row of the list."""
    size = row["archive_bytes"]
    number = row["classes"] if row["task"] == "classification" else row["task"]
    return (
        row["name"],
        *(f"{n:,}" if n else "?" for n in (row["images"], row["domains"])),
        str(number or "?"),
        "" if size is None else f"{size / 1e6:,.0f} MB",
        "yes" if row["here"] else "no",
        ", ".join(f"{pixels} px" for pixels in row["decoded"]),
    )


def _row(name: str, data_root: Path | None, cache: Path) -> dict[str, Any]:
    from feddg_bench.data.image_store import decoded_sizes

    dataset: DomainDataset | type[DomainDataset] = load_dataset(name)
    folder, here = None, True
    try:
        dataset = make_dataset(name, data_root)
        folder = dataset.find()
    except DataError:
        here = False
    known = sum(map(sum, dataset.counts.values())) or sum(dataset.split_sizes.values())
    images = known or dataset.total
    if images is None and here and not isinstance(dataset, type) and folder is None:
        images = len(dataset.records().paths)  # embedded, so quickly listed
    return {
        "name": name,
        "title": dataset.title,
        "images": images,
        "domains": len(dataset.domains),
        "classes": len(dataset.classes),
        "task": dataset.task,
        "archive_bytes": dataset.archive_bytes,
        "licence": dataset.licence,
        "source": dataset.source,
        "download": bool(dataset.downloads),
        "here": here,
        "folder": None if folder is None else str(folder),
        "decoded": decoded_sizes(dataset, cache),
    }


@data_app.command("check")
def check_command(
    dataset: Dataset,
    split_csv: Annotated[
        Path | None, typer.Option(help="Split file to check against the images.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Signatures that `data sign` wrote.")
    ] = None,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    json_: Json = False,
) -> None:
    """Compare a data set with the published one. Also decoded images with their checksums.

    It reports what was compared: numbers of images, duplicates, and every image if signatures of
    the published ones are known. Those of PACS are included, and `data sign` makes them from any
    clean copy.

    Exit status: 0 if nothing differs, 1 if something does, 2 if it cannot be checked.
    """
    from feddg_bench.common.files import cache_dir as find_cache

    opened = _as_in_a_run(make_dataset(dataset, data_root))
    if split_csv is not None and not split_csv.is_file():
        raise SettingsError(f"there is no split file {split_csv}: give another --split-csv")
    diagnosis = _examined(opened, split_csv, against=against, cache_dir=find_cache(cache_dir))
    if json_:
        print_json(diagnosis.as_json())
    else:
        say("\n".join(map(printable, _report(diagnosis))))
    if diagnosis.findings:
        raise typer.Exit(1)


@data_app.command("sign")
def sign_command(
    dataset: Dataset,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default DATASET.signatures.xz.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Write signatures of a clean copy. `data check --against` compares other copies with them.

    They take 11 bytes per image, from which no image can be restored.
    """
    from feddg_bench.data.inspect.doctor import sign
    from feddg_bench.data.inspect.signatures import save_signatures

    path = out or Path(f"{dataset}.signatures.xz")
    opened = make_dataset(dataset, data_root)
    with _progress(f"signing {dataset}") as bar:
        signatures = sign(opened, bar.show)
    save_signatures(path, signatures, dataset)
    say(f"{path}: {counted(len(signatures.names), 'image')}, {path.stat().st_size:,} bytes")


def _examined(opened: DomainDataset, split_csv: Path | None = None, **how: Any) -> Diagnosis:
    """Return the diagnosis of a data set by `examine`, and show progress."""
    from feddg_bench.data.inspect.doctor import examine

    with _progress(f"checking {opened.name}") as bar:
        return examine(opened, split_csv, bar.show, **how)


INDENT = " " * 4
WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
"""Names are not broken across two lines."""


def _report(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the diagnosis as human-readable lines."""
    where = f" in {diagnosis.folder}" if diagnosis.folder else ""
    yield f"{diagnosis.title}{where}: {counted(diagnosis.images, 'image')}"
    if diagnosis.layout:
        yield f"layout: {diagnosis.layout}"
    for domain, classes in diagnosis.counts.items():
        wanted = diagnosis.published.get(domain)
        total = sum(classes.values())
        published = "" if wanted is None else f" of {sum(wanted.values()):,} published"
        yield f"  {domain}: {counted(total, 'image')}{published}"
        if wanted is None and len(classes) > 1:
            counts = ", ".join(f"{name} {count:,}" for name, count in classes.items())
            indents: Any = {"initial_indent": INDENT, "subsequent_indent": INDENT}
            yield from textwrap.wrap(counts, 80, **indents, **WHOLE)
    if diagnosis.fingerprint:
        yield f"contents: {diagnosis.fingerprint}"
    for finding in diagnosis.findings:
        yield from _folded(f"{'fault' if diagnosis.own else 'differs'}: {finding.text}")
    for note in diagnosis.notes:
        yield from _folded(f"note: {note}")
    if diagnosis.compared:
        yield from _folded(f"compared with the published data set: {'; '.join(diagnosis.compared)}")
    elif not diagnosis.own:
        yield "no reference is available for this data set"
    if diagnosis.own:
        faults = len(diagnosis.findings)
        yield counted(faults, "fault") if faults else "clean: no fault was found"
    elif not diagnosis.findings:
        yield "clean: nothing differs" + ("; results compare" if diagnosis.compared else "")
    elif diagnosis.comparable:
        yield "results stay comparable"
    else:
        yield "results on this copy do not compare with those on the published data set"


def _folded(text: str) -> list[str]:
    return textwrap.wrap(printable(text), 80, subsequent_indent=INDENT, **WHOLE)


@data_app.command("prepare")
def prepare_command(
    dataset: Dataset,
    size: Annotated[
        str | None, typer.Option(help="Pixels a side, comma-separated; default the recipe's.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe whose size to take; default the data set's own.")
    ] = None,
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
    processes: Annotated[
        int, typer.Option(min=0, help="Processes that decode; 0: one per core, for many images.")
    ] = 0,
) -> None:
    """Decode a data set now. If stopped or killed, the same command resumes."""
    if size is not None and recipe is not None:
        raise SettingsError("give --size or --recipe, not both: a recipe says its own size")
    sizes = [] if size is None else _sizes(size)

    from feddg_bench.common.files import cache_dir as find_cache
    from feddg_bench.data.image_store import open_store

    opened, cache = make_dataset(dataset, data_root), find_cache(cache_dir)
    if sizes:
        opened = _as_in_a_run(opened)
    else:
        data = _recipe_data(dataset, recipe or opened.default_recipe)
        opened, sizes = opened.decoded(data), [data.image_size]
    for pixels in sizes:
        started = time.monotonic()
        with _progress(f"decoding {dataset} at {pixels} px") as bar:
            store = open_store(opened, pixels, cache, bar.show, processes=processes)
        seconds = time.monotonic() - started
        done = f"decoded in {seconds:.0f} s" if bar.told else "decoded already"
        gib = store.images.nbytes / 2**30
        say(
            f"{dataset} at {pixels} px: {counted(len(store.images), 'image')}, {gib:.2f} GiB, "
            f"{done}: {store.images.filename}"
        )


@data_app.command("encode")
def encode_command(
    dataset: Dataset,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Backbone of the suite, timm:NAME, torchvision:NAME, open_clip:ARCH/TAG or an "
            "entry point; default the recipe's."
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=8, max=1024, help="Pixels a side; default the recipe's.")
    ] = None,
    views: Annotated[
        int | None, typer.Option(min=1, max=1024, help="The clean image, and augmented ones.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights; default those of the package.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Import a safetensors file of features."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="Recipe of the runs.")] = "features",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    data_root: DataRoot = None,
    cache_dir: CacheDir = None,
) -> None:
    """Encode images once by a frozen network, for runs with backbone.name=features.

    Images are read from their files, and no pixels are stored. If stopped or killed, the same
    command resumes. At the end it prints the accuracy of two simple classifiers on a held-out tenth
    of each domain, and warns of an encoder that hardly tells classes apart.
    """
    from feddg_bench.common.files import cache_dir as find_cache
    from feddg_bench.data.feature_store import Encoding, open_features
    from feddg_bench.engine.devices import find_devices
    from feddg_bench.engine.encoders import build_encoder
    from feddg_bench.runs.encode import encode_dataset, import_features, probe

    opened, cache = make_dataset(dataset, data_root), find_cache(cache_dir)
    given = {"encoder": encoder, "views": views}
    layer: dict[str, Any] = {"features": {k: v for k, v in given.items() if v is not None}}
    if encoder is not None:
        layer["backbone"] = {"name": "features", "pretrained": False}
    if size is not None:
        layer["data"] = {"image_size": size}
    s = settle(recipe_layers(recipe, dataset, "fedavg")._replace(user=layer))
    encoding = Encoding.of(s)
    if encoding is None:
        raise SettingsError(f"recipe {recipe} names no encoder: give one with --encoder")
    started = time.monotonic()
    if from_ is not None:
        path = import_features(from_, opened, encoding, cache)
    else:
        network = build_encoder(str(s.features.encoder), s.data.image_size, weights)
        with _progress(f"encoding {dataset} at {s.data.image_size} px") as bar:
            place = find_devices(device)[0]
            path = encode_dataset(opened, encoding, network, cache, place, bar.show)
    listed = opened.records()
    store = open_features(path, len(listed.paths), skipped=s.data.skip_unreadable)
    images, shown, width = store.features.shape
    say(
        f"{dataset} at {store.size} px by {store.encoder}: {images:,} images, "
        f"{counted(shown, 'view')}, {width:,} features, {time.monotonic() - started:.0f} s\n"
        f"{path}\ncontents: {store.fingerprint}, weights: {store.weights[:16]}"
        + f", texts of {len(store.text)} classes"
        * bool(len(store.text))
    )
    if not opened.classes:
        return
    found = probe(store, listed.labels, len(opened.classes))
    say(
        f"held-out tenth of each domain: class means {found.class_means:.1%}, ridge "
        f"{found.ridge:.1%}, chance {found.chance:.1%}"
    )
    if found.lacks_semantics:
        logger.warning(
            "the encoder hardly tells the classes apart: its weights may be random, damaged or "
            "trained for something else"
        )


def _recipe_data(dataset: str, recipe: str) -> DataSettings:
    """Return the data settings of a recipe's runs on a data set."""
    return settle(recipe_layers(recipe, dataset, "fedavg")).data


def _as_in_a_run(opened: DomainDataset) -> DomainDataset:
    """Return a data set whose image files are decoded as in runs of its default recipe."""
    try:
        return opened.decoded(_recipe_data(opened.name, opened.default_recipe))
    except SettingsError:  # the recipe has no entry for a third party's data set
        return opened


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(not 8 <= size <= 1024 for size in sizes):
        raise SettingsError(f"cannot read --size {text!r}: expected pixels from 8 to 1024")
    return list(dict.fromkeys(sizes))


@data_app.command("show")
def show_command(
    dataset: Dataset,
    out: Annotated[Path | None, typer.Option(help="File to write; default DATASET.png.")] = None,
    size: Annotated[int, typer.Option(min=8, max=1024, help="Pixels a side of an image.")] = 96,
    data_root: DataRoot = None,
) -> None:
    """Draw a contact sheet. Domains down, classes or targets across, at most twelve of each."""
    from feddg_bench.data.inspect.contact_sheet import contact_sheet

    path = out or Path(f"{dataset}.png")
    if path.suffix.lower() != ".png":
        raise SettingsError(
            f"cannot write {path}: the sheet is a PNG, so give an --out that ends so"
        )
    opened = _as_in_a_run(make_dataset(dataset, data_root))
    picture = contact_sheet(opened, size)
    try:
        with replacing(path) as file:
            file.write(picture)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; give another --out") from error
    say(path)
    if not "".join((*opened.domains, *opened.classes)).isascii():
        say("letters other than ASCII are shown as ?; rows and columns are in the order of names")


@data_app.command("path")
def path_command(
    dataset: Annotated[
        str | None,
        typer.Argument(help="Only this one; default all.", autocompletion=complete.DATASET),
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Remember this folder.")
    ] = None,
) -> None:
    """Show or set the folders of data sets. `all DIR` sets the folder of all."""
    from feddg_bench.data.locations import data_roots, remember_root, settings_file

    one = None if dataset in (None, "all") else dataset
    if one is not None:
        one = plugin_name("data set", one)
    if directory is not None:
        say(f"noted in {remember_root(directory, one)}")
    for line in each_usable("data set", _found) if one is None else (_found(one),):
        say(line)
    roots = ", ".join(map(str, data_roots(dataset=one))) or "no folder"
    what = "all data sets are" if one is None else f"{one} is"
    say(f"{what} looked for in: {roots} (settings file: {settings_file()})")


def _found(name: str) -> str:
    try:
        folder = make_dataset(name).find()
    except DataError:
        return f"{name}: not found"
    return f"{name}: {'embedded' if folder is None else folder}"


class _Bar:
    """Shows progress on standard error, if that is a terminal."""

    told = False

    def __init__(self, progress: Progress, title: str) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=None)

    def show(self, done: int, total: int) -> None:
        self.told = True
        self.progress.update(self.task, completed=done, total=total)


@contextmanager
def _progress(title: str) -> Iterator[_Bar]:
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with Display(MofNCompleteColumn(), TimeRemainingColumn()) as display:
        yield _Bar(display.progress, title)


@data_app.command("download")
def download_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="See `feddg-bench data list`; or vgg19, vgg19_16x: AdaIN's network.",
            autocompletion=complete.DATASET,
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
    """Download a data set or a style network if its licence permits.

    If stopped, the same command resumes. The data folder is $FEDDG_DATA, else that of the settings
    file, else ~/.local/share/feddg-bench. Files are checked before use; then a data set is examined
    as by `data check`, and the checkpoints of a network become one .safetensors file.
    """
    from feddg_bench.data.fetch.obtain import check_offer, obtain
    from feddg_bench.data.fetch.style_networks import WEIGHTS, WeightsDownload, obtain_weights
    from feddg_bench.data.locations import NETWORKS, data_home, find_network, remember_root

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
        get, home, size = partial(obtain_weights, offer), NETWORKS, None
    folder = absolute(to or data_home() / home)
    about = "" if size is None else f", about {size / 1e6:,.0f} MB"
    say(f"{offer.title}{about}; licence: {offer.licence}\nsource: {offer.source}\nto: {folder}")
    with _bars(offer.source) as show:
        notes = get(folder, mirror or (), show)
    say("\n".join(notes))
    if isinstance(offer, WeightsDownload):
        found = find_network(name) == folder / offer.file  # then runs find it as well
        where = "" if found else f" hyper.style_weights={folder / offer.file}"
        say(f"use it: hyper.style={name}{where}")
        return
    diagnosis = _examined(offer(folder))
    say("\n".join(map(printable, _report(diagnosis))))
    say(f"noted in {remember_root(folder, offer.name)}")
    if diagnosis.findings:
        raise typer.Exit(1)


@contextmanager
def _bars(source: str) -> Iterator[Callable[[str, str], Callable[[int, int], None]]]:
    """Show amount, speed and time left of successive steps, if on a terminal.

    An error names the ``source``; after an interrupt, the message says how to resume.
    """
    try:
        with _amounts() as show:
            yield show
    except DataError as error:
        raise DataError(f"{error}; by hand: {source}") from error
    except RunInterruptedError as stop:
        print(stopped(), file=sys.stderr)
        raise typer.Exit(128 + stop.signal_number) from stop


@contextmanager
def _amounts() -> Iterator[Callable[[str, str], Callable[[int, int], None]]]:
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
