"""The documented commands work, and the documented flags and settings exist."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

import feddg_bench as fb
from feddg_bench import cli, plugins
from feddg_bench.common.errors import RunInterruptedError
from feddg_bench.config.layers import dotted_fields
from feddg_bench.config.reading import read_yaml
from tests import pages
from tests.environment import Environment
from tests.fabricate import fabricate
from tests.pages import ROOT

TEXTS = {pages.name(page): page.read_text() for page in pages.PAGES}
MAKEFILE = (ROOT / "Makefile").read_text()

SHORT = ("rounds=2", "clients=4", "per_round=3")
"""Settings that shorten commands which train."""

DRY = {
    "run": {"all", "cuda", "pacs", "ray"},
    "sweep": {"--address", "--device", "--engine", "lambda", "leakage", "ltdo"},
    "tune": {"tune"},
}
"""Command -> words with which it trains for hours, or needs a GPU, a cluster or a published data
set: it runs with ``--dry-run`` then."""

STOPPED = {
    "--install-completion": "typer.completion.install",
    "--show-completion": "typer.completion.get_completion_script",
    "attack": "feddg_attacks.judges.open_judges",
    "profile": "feddg_bench.runs.time_profile.profile",
    "data download vgg19": "feddg_bench.data.fetch.style_networks.obtain_weights",
    "data download": "feddg_bench.data.fetch.obtain.obtain",
}
"""Long commands and downloads without a dry run -> where they stop, after all checks."""

PARSED = (
    "data check pacs",
    "data encode",
    "results check --results mine",
    "run --dataset pacs --recipe features",
    "run --method fedavg,fedbound hyper.bound=0.1",
    "run --method pardon --dataset pacs --data-root DIR",
    "run --method pardon --dataset pacs --recipe pardon-cached",
    "run --method pardon,fedavg,ccst --recipe converged --tuned",
    "predict KEY IMAGES --encoder",
    "data check officehome",
    "data sign officehome",
    "data prepare pacs",
    "data show pacs",
    "run --method all --dataset pacs --recipe laptop --tuned",
    "run --dataset planted_tint --method ccst",
    "run --method fedavg,pardon --scenario chalk --portable",
    "sweep strength",
    "figures strength",
    "report --results mine",
    "runs --results mine",
    "tables --results results/NAME",
)
"""These need images of a published data set, their features, a GPU, tuning, a process started as
portable, or runs that other commands of the page make: only their arguments are checked."""

FEWER = {
    "figures all": ["--method", "ccst"],
    "figures generalisation": ["--method", "ccst"],
    "figures styles": ["--method", "ccst", "--clients", "4", "--per-round", "2", "--workers", "1"],
}
"""Options that shorten a command."""

NAMED = ("data encode", "data prepare", "data sign", "datasets new", "methods new")
"""The text names these without arguments; the error about missing arguments is accepted."""

OTHERS = ("cat", "cd", "export", "git", "pytest", "ray", "sbatch", "source", "srun", "wandb")
"""Programs of others, which are not checked."""

PACKAGES = ("open_clip_torch",)
"""Packages of others, which pages have installed."""

SWEEP = """
method: grid
command: ["${env}", feddg-bench, run, "${args_no_hyphens}"]
parameters: {seed: {values: [0, 1]}}
"""

Run = Callable[..., Any]
Fault = Callable[[Sequence[str]], str]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of shell lines, each as words, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= {"&", ";"}:
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def code_spans(text: str) -> Iterator[str]:
    """Yield the inline code of a page."""
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        yield " ".join(span.replace("\\|", "|").split())


def shown_commands(text: str) -> Iterator[list[str]]:
    """Yield every command that a page shows, including commands quoted inside others."""
    ours = cli.helps()
    blocks = console_blocks(text)
    blocks += [line.replace(",", " ") for line in re.findall(r"\[(feddg-bench, .*)\]", text)]
    for span in code_spans(text):
        first, _, rest = span.partition(" ")
        if first in ours and rest:
            blocks.append(f"feddg-bench {span}")
        elif rest and (first in ("feddg-bench", "make", "pip", "python") or first in OTHERS):
            blocks.append(span)
    for block in blocks:
        for words in shell_commands(block):
            if "..." not in words:
                yield words
                yield from (w.split() for w in words if w.startswith("feddg-bench "))


FOLLOWED = ("docs/start.md", "docs/submit.md", *(
    f"docs/tutorials/{name}.md" for name in ("datasets", "images", "methods")
))  # fmt: skip
"""Pages that show what each command prints, in the order in which a reader calls them."""


def console_blocks(text: str) -> list[str]:
    """Return the commands of a page that stand on lines of their own."""
    return re.findall(r"^```console\n(.*?)^```", text, flags=re.M | re.S)


CALLED = {
    tuple(words)
    for page in FOLLOWED
    for block in console_blocks(TEXTS[page])
    for words in shell_commands(block)
}
"""Commands that `test_a_reader_sees_the_shown_outputs` calls."""

FIRST: dict[tuple[str, ...], str] = {}
"""Command, without ``--dry-run``, -> the first page that shows it."""
for _page, _text in TEXTS.items():
    for _words in shown_commands(_text):
        if tuple(_words) in CALLED and not _words[-1].startswith("."):  # extras are checked here
            continue
        FIRST.setdefault(tuple(word for word in _words if word != "--dry-run"), _page)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folder of a finished and an interrupted run, and their keys."""

    class Stop(fb.Observer):
        def round(self, run: Any, result: Any) -> None:
            if result.round == 1:
                raise RunInterruptedError(2)

    place, cache = (tmp_path_factory.mktemp(name) for name in ("trained", "decoded"))
    settings = {"clients": 3, "per_round": 1, "data.image_size": 8, "data.id_test_fraction": 0.5}
    tiny: dict[str, Any] = {
        "scenario": "ip-o-c",
        "results": place,
        "cache_dir": cache,
        "workers": 1,
        "quiet": True,
    }
    (kept,) = fb.run(settings={**settings, "rounds": 1}, keep="last", **tiny)
    with pytest.raises(RunInterruptedError):
        fb.run(settings={**settings, "rounds": 2}, observers=[Stop()], **tiny)
    (begun,) = (place / "checkpoints").glob("*.safetensors")
    return {"folder": str(place), "predict": kept.key, "resume": begun.stem}


@pytest.fixture
def place(tmp_path: Path, trained: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fill a folder with everything that the commands of the pages need."""
    fabricate("folder", tmp_path / "pictures")
    shutil.copytree(tmp_path / "pictures/night", tmp_path / "new-pictures")
    for name in ("runs", "other"):
        shutil.copytree(trained["folder"], tmp_path / name)
    for name in ("records", "attacks"):
        shutil.copytree(ROOT / "results/leakage" / name, tmp_path / "runs" / name)
    shutil.copytree(ROOT / "results/noise/records", tmp_path / "runs/records", dirs_exist_ok=True)
    for name in ("handwritten", "noise", "worlds"):
        shutil.copytree(
            ROOT / "results" / name / "records", tmp_path / "results" / name / "records"
        )
    (tmp_path / "results/records").mkdir()
    for packed in (ROOT / "results/records").glob("pacs-ltdo-desktop*"):
        shutil.copy(packed, tmp_path / "results/records")
    (tmp_path / "mine.yaml").write_text(SWEEP)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDDG_CONFIG", raising=False)
    return tmp_path


class StoppedError(Exception):
    """A command has reached the place where it is stopped."""


def stop(*_: object, **__: object) -> None:
    raise StoppedError


@pytest.fixture
def fault_of(
    feddg: Run, place: Path, trained: dict[str, str], anew: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fault]:
    """Return a function that runs or checks a command and returns its fault, or an empty string."""

    installed = []

    def of_ours(given: list[str]) -> str:
        values = {"DIR": "pictures", "FILE": "mine.yaml", "KEY": trained.get(given[0], "")}
        values["NAME"] = "pacs" if given[0] == "datasets" else "fedavg"
        shown = " ".join(given)
        given = [values.get(word, word) for word in given]
        text = " ".join(given)
        if given[0] in DRY:
            given += ["--dry-run"] if DRY[given[0]] & {*given} else SHORT
        with monkeypatch.context() as patch:
            for begin, where in STOPPED.items():
                if text.startswith(begin):
                    patch.setattr(where, stop)
            if shown.startswith(PARSED):
                patch.setattr(TyperCommand, "invoke", lambda *_: 0, raising=False)
            try:
                done = feddg(*given, *FEWER.get(text, ()))
            except StoppedError:
                return ""
        if done.code == 0 or (text in NAMED and "missing argument" in done.err):
            return ""
        return done.err.strip() or done.out.strip()[-300:]

    def install(package: str) -> None:
        """Imitate `pip install -e` of a package that has a plugin of the same name."""
        info = place / f"site/{package}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        project = tomllib.loads(Path(package, "pyproject.toml").read_text())["project"]
        ((group, (entry,)),) = [(g, e.items()) for g, e in project["entry-points"].items()]
        entry = f"[{group}]\n{' = '.join(entry)}\n"
        (info / "entry_points.txt").write_text(entry)
        for folder in (info.parent, place / package):
            monkeypatch.syspath_prepend(folder)
        installed.append(package)
        anew()

    def fault(words: Sequence[str]) -> str:
        program, *given = words
        if program == "feddg-bench":
            return of_ours(given)
        if program == "make":
            known = re.findall(r"^(\w+)(?=:| \?=)|\$\((\w+)\)", MAKEFILE, flags=re.M)
            unknown = {w.partition("=")[0] for w in given} - {name for two in known for name in two}
            return "".join(f"the Makefile has no {name}" for name in unknown)
        if program == "pip":
            if given[-1] in PACKAGES:
                return ""
            package, _, extras = given[-1].rstrip("]").partition("[")
            folder = ROOT if package == "." else Path(package)
            project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
            if folder != ROOT:
                install(package)
            known = project.get("optional-dependencies", {})
            return "".join(
                f"there is no extra {e}" for e in re.findall(r"\w+", extras) if e not in known
            )
        if program in ("python", "python3"):
            module = given[given.index("-m") + 1]
            return "" if find_spec(module) else f"there is no module {module}"
        return "" if program in OTHERS else f"there is no program {program}"

    yield fault
    for package in installed:
        sys.modules.pop(package, None)


@pytest.mark.nightly
@pytest.mark.parametrize("page", sorted({*FIRST.values()}))
def test_commands_work(page: str, fault_of: Fault) -> None:
    """A command shown on several pages runs only for the first one."""
    mine = [words for words, first in FIRST.items() if first == page]
    faults = [(shlex.join(words), fault) for words in mine if (fault := fault_of(words))]
    assert faults == []


YAML = [
    pytest.param(block, id=f"{page}-{number}")
    for page, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", text, flags=re.M | re.S))
]


@pytest.mark.nightly
@pytest.mark.parametrize("block", YAML)
def test_files_work(block: str, feddg: Run, place: Path) -> None:
    """Recipes, sweeps and ranges of tuning that pages show."""
    content = yaml.safe_load(block)
    (place / "ranges").mkdir()
    (place / "ranges/fedprox.yaml").write_text(block)
    if "description" in content:
        assert feddg("recipes", "show", "ranges/fedprox.yaml").code == 0
    elif "method" in content:
        assert feddg("sweep", "ranges/fedprox.yaml", "--dry-run").code == 0
    elif "parameters" in content:
        assert feddg("tune", "--method", "fedprox", "--ranges", "ranges", "--dry-run").code == 0
    else:
        assert content["kind"] == "Job"  # for Kubernetes


@pytest.mark.nightly
def test_shown_tables_are_those_of_our_records(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs in the tutorial that compares three methods, line by line."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "runs/records").mkdir(parents=True)
    for packed in (ROOT / "results/records").glob("digits4-ltdo-quick*"):
        shutil.copy(packed, tmp_path / "runs/records")
    text = TEXTS["docs/tutorials/compare.md"]
    methods = "pardon,fedavg,ccst"
    printed = feddg("run", "--method", methods, "--num-seeds", 3).out
    printed += feddg("tables", "--rows", methods, "--columns", "scenario").out
    lines = {line.strip() for line in printed.splitlines()}
    _plan, first, second, _generic = re.findall(r"^```text\n(.*?)^```", text, flags=re.M | re.S)
    shown = [line.strip() for block in (first, second) for line in block.splitlines()]
    assert [line for line in shown if line not in lines] == []


PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)
BEFORE = {"docs/tutorials/datasets.md": "docs/tutorials/images.md"}
"""Page -> the page whose first block of Python draws the images that it uses."""


@pytest.mark.nightly
@pytest.mark.skipif(
    find_spec("pip") is None or find_spec("hatchling") is None, reason="needs pip, hatchling"
)
@pytest.mark.parametrize("page", FOLLOWED)
def test_a_reader_sees_the_shown_outputs(page: str, tmp_path: Path) -> None:
    """Every shown line is printed, whatever its numbers, by the block of commands above it."""
    reader = Environment(tmp_path)
    if page in BEFORE:
        python_of(re.findall(PYTHON, TEXTS[BEFORE[page]])[0], reader)
    printed, key, missing = "", "", []
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", TEXTS[page], flags=re.M | re.S)
    for kind, block in blocks:
        if kind == "text":
            lines = {"", "...", *map(shape, printed.splitlines())}
            missing += [line for line in block.splitlines() if shape(line) not in lines]
        elif kind == "python":
            printed = python_of(block, reader)
        elif kind == "console":
            commands = shell_commands(block.replace("KEY", key))
            printed = "".join(called(words, reader) for words in commands)
            kept = re.search(r"\b[0-9a-f]{16}\b", printed)
            key = kept[0] if kept else key
    assert missing == []


def python_of(block: str, reader: Environment) -> str:
    """Return what a block of Python prints."""
    (reader.place / "page.py").write_text(block)
    return str(reader.run("page"))


def called(words: Sequence[str], reader: Environment) -> str:
    """Return what a command of a page prints; programs of others are not called."""
    program, *given = words
    if program == "make":  # the command of its target
        recipe = re.search(
            rf"^{given[0]}:.*\n\t\$\(BIN\)/(.*) \$\(PORTABLE\)$", MAKEFILE, flags=re.M
        )
        assert recipe is not None
        program, *given = recipe[1].split()
    if program == "feddg-bench":
        return str(reader.show("feddg_bench", *given))
    if program == "pytest":
        return str(reader.run("pytest", *given))
    if program == "pip" and "-e" in given and not given[-1].startswith("."):
        reader.install(f"./{given[-1].partition('[')[0]}")
    return ""


def shape(line: str) -> str:
    """Return a line without its numbers, keys and widths."""
    line = re.sub(r"\b[0-9a-f]{8,}\b|[+-]?\d[\d.,]*", "0", line)
    return re.sub(r"[\s\N{BOX DRAWINGS LIGHT HORIZONTAL}]+", " ", line).strip()


def test_flags_exist() -> None:
    """Flags that a page names outside of a command."""
    known = set(every_option(cli._command()))
    flags = {
        word.partition("=")[0]
        for text in TEXTS.values()
        for span in code_spans(text)
        if span.startswith("--")
        for word in span.split()
        if word.startswith("--")
    }
    assert len(flags) > 20
    assert flags - known == set()


def every_option(command: Any) -> Iterator[str]:
    """Yield the options of a command and of its subcommands."""
    for parameter in command.params:
        yield from parameter.opts
    for inner in getattr(command, "commands", {}).values():
        yield from every_option(inner)


def test_settings_exist() -> None:
    """Settings that a page names, and the values that it gives them."""
    fields = [*dotted_fields()]
    fields.append(("hyper.bound", FieldInfo(annotation=float)))  # set by `methods new`
    for method in plugins.names("method"):
        fields += dotted_fields(plugins.load_method(method).Settings, "hyper.")
    known: dict[str, list[FieldInfo]] = {}
    for key, field in fields:
        known.setdefault(key, []).append(field)
    sections = {key.partition(".")[0] for key in known if "." in key}
    shown = {
        (section, span)
        for text in TEXTS.values()
        for span in code_spans(text)
        for section in re.findall(r"^(\w+)\.\w+(?:=\S+)?$", span)
        if section in sections
    }
    assert len(shown) > 40
    for _, span in shown:
        key, given, value = span.partition("=")
        assert key in known, span
        if given:
            assert any(takes(field, read_yaml(value, span)) for field in known[key]), span


def takes(field: FieldInfo, value: Any) -> bool:
    """Return whether a setting accepts a value."""
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
    except ValidationError:
        return False
    return True
