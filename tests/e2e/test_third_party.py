"""A third-party method: created by a command, installed, found by name, held to the contract."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

import feddg_bench as fb
from feddg_bench import testing
from feddg_bench.cli.templates import EXAMPLES, write_data_set, write_method
from feddg_bench.common.errors import SettingsError
from feddg_bench.plugins import GROUPS, check_declared
from feddg_bench.testing import contract
from tests.environment import Environment, draw_images
from tests.helpers import one_sentence, refused

EXAMPLE = Path(__file__).parents[1] / "example_plugin"


every_kind = pytest.mark.parametrize("kind", EXAMPLES)


@every_kind
def test_a_new_package_is_about_the_new_method_alone(tmp_path, kind):
    for path in write_method("FedDG-X2", tmp_path, kind).files:
        text = path.read_text()
        for example in EXAMPLES.values():
            assert example not in (path.name + text).lower()
    assert '"""FedDGX2: say' in (tmp_path / "feddg_x2.py").read_text()
    assert 'title = "FedDG-X2"' in (tmp_path / "feddg_x2.py").read_text()


def test_a_new_data_set_is_about_its_images_alone(tmp_path):
    write_data_set("My-Own", tmp_path)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "shapes" not in text.lower()
    assert 'title = "My-Own"' in text
    assert '[project.entry-points."feddg_bench.datasets"]\nmy_own = "my_own:MyOwn"' in text
    with refused(SettingsError, "there is a data set 'pacs' already"):
        write_data_set("PACS", tmp_path)


@every_kind
@pytest.mark.parametrize(
    ("name", "module", "title"),
    [
        ("mine", "mine", "Mine"),
        ("my_own", "my_own", "MyOwn"),
        ("my-own-2", "my_own_2", "MyOwn2"),
        ("FedX", "fedx", "FedX"),
        ("F2", "f2", "F2"),
        ("fedbound", "fedbound", "Fedbound"),
    ],
)
def test_the_entry_point_names_the_class_whatever_the_name(
    tmp_path, monkeypatch, kind, name, module, title
):
    monkeypatch.syspath_prepend(tmp_path)
    assert write_method(name, tmp_path, kind).name == module
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    group = GROUPS["method"]
    ((entered, place),) = project["project"]["entry-points"][group].items()
    assert (entered, project["project"]["name"]) == (module, module)
    try:
        loaded = EntryPoint(entered, place, group).load()
    finally:
        del sys.modules[module]
    check_declared(loaded)
    assert loaded.__name__ == title


def test_the_command_takes_a_kind_and_refuses_others(feddg, tmp_path):
    done = feddg("methods", "new", "mine", "--kind", "style", "--dir", "there")
    assert done.code == 0
    assert 'group = "style"' in (tmp_path / "there/mine.py").read_text()
    done = feddg("methods", "new", "mine", "--kind", "styles", "--dir", "here")
    assert done.code == 2
    assert "unknown kind of method 'styles'; did you mean 'style'?" in done.err
    assert not (tmp_path / "here").exists()


def test_the_default_kind_changes_the_server(feddg, tmp_path):
    done = feddg("methods", "new", "Mine")
    assert done.code == 0
    assert "feddg-bench run --method mine; pytest mine" in done.out
    assert "def aggregate(self, server" in (tmp_path / "mine/mine.py").read_text()


@pytest.mark.parametrize("example", [*EXAMPLES.values(), "shapes"])
def test_an_example_imports_public_names_only(example):
    for path in (EXAMPLE / f"{example}.py", EXAMPLE / f"test_{example}.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = {name.name for name in node.names}
                assert not {name for name in named if name.startswith("feddg")} - {"feddg_bench"}
            if isinstance(node, ast.ImportFrom) and node.module.startswith("feddg_"):
                public = {"feddg_bench": fb, "feddg_bench.testing": testing}[node.module]
                assert all(hasattr(public, name.name) for name in node.names)


def test_a_new_method_is_short():
    lines = (EXAMPLE / "fedbound.py").read_text().splitlines()
    assert len(lines) <= 40


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1clip", "cannot name a method"),
        ("", "cannot name a method"),
        ("fed clip", "cannot name a method"),
        ("../clip", "cannot name a method"),
        ("clip-", "cannot name a method"),
        ("class", "a file class.py would hide; choose another, such as my_class"),
        ("Torch", "a file torch.py would hide; choose another, such as my_torch"),
        ("server", "a class Server would hide a name that its own module uses"),
        ("fedavg", "there is a method 'fedavg' already"),
        ("Fed-Avg", "there is a method 'fedavg' already"),
    ],
)
def test_names_that_a_new_method_cannot_have(name, said, tmp_path):
    with refused(SettingsError, said):
        write_method(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "test_fedbound.py").write_text("mine")
    with refused(SettingsError, "is there already"):
        write_method("fedbound", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_fedbound.py"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return an environment with a new package of each kind, begun by the command."""
    if find_spec("pip") is None or find_spec("hatchling") is None:
        pytest.skip("needs pip and hatchling")
    made = Environment(tmp_path_factory.mktemp("authors"))
    for kind in EXAMPLES:
        made.run("feddg_bench", "methods", "new", f"New-{kind}", "--kind", kind)
    made.run("feddg_bench", "datasets", "new", "New-Images")
    made.install("./new_images", *(f"./new_{kind}" for kind in EXAMPLES))
    return made


TINY = ("--clients", 4, "--per-round", 2, "--rounds", 2, "--workers", 2, "data.image_size=8")


@pytest.mark.nightly
def test_new_packages_are_found_and_run_by_name_in_two_processes(environment):
    listed = json.loads(environment.run("feddg_bench", "methods", "--json"))
    assert {f"new_{kind}" for kind in EXAMPLES} <= {entry["name"] for entry in listed}
    methods = ",".join(f"New-{kind}" for kind in EXAMPLES)
    run = ("run", "--method", methods, "--scenario", "oc-i-p", *TINY, "--json")
    records = json.loads(environment.run("feddg_bench", *run))["runs"]
    assert [record["method"] for record in records] == [f"new_{kind}" for kind in EXAMPLES]
    assert {record["settings"]["federation"]["rounds"] for record in records} == {2}


@pytest.mark.nightly
def test_a_new_data_set_is_shown_checked_and_run_by_name(environment):
    draw_images(environment.place / "images", ("photo", "drawing", "clipart", "sketch"))
    given = ("new_images", "--data-root", "images")
    facts = json.loads(environment.run("feddg_bench", "datasets", "show", *given, "--json"))
    assert facts["codes"] == ["p", "d", "c", "s"]
    assert "sketch" in environment.run("feddg_bench", "data", "check", *given)
    run = ("run", "--method", "fedavg", "--dataset", *given, *TINY, "--json")
    records = json.loads(environment.run("feddg_bench", *run))["runs"]
    assert [record["scenario"]["name"] for record in records] == [
        "cs-p-d",
        "ps-d-c",
        "pd-c-s",
        "dc-s-p",
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*EXAMPLES, "images"])
def test_the_tests_of_a_new_package_pass(environment, kind):
    out = environment.run("pytest", "-q", "-p", "no:cacheprovider", f"new_{kind}")
    assert " passed in " in out


@pytest.fixture
def installed(tmp_path, monkeypatch, anew):
    """Return a function that installs a package: its module's text and its entry points."""

    def install(package, text, **entries):
        (tmp_path / f"{package}.py").write_text(text)
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        groups = [f"[feddg_bench.{group}]\n{entry}\n" for group, entry in entries.items()]
        (info / "entry_points.txt").write_text("".join(groups))
        anew()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in ("theirs", "other"):
        sys.modules.pop(module, None)


IMPORT = "raise ImportError('an extra is missing')\n"
OWN = """
from feddg_bench import DomainDataset, Method
class Mine(Method):
    pass
class Data(DomainDataset):
    pass
"""
FAULTS = {
    "import": (
        IMPORT,
        "It",
        "of the package theirs cannot be imported: ImportError: an extra is missing (theirs.py, "
        "line 1); fix or uninstall theirs",
    ),
    "attribute": (
        "",
        "It",
        "of the package theirs cannot be imported: AttributeError: module 'theirs' has no "
        "attribute 'It'",
    ),
    "kind": (
        "It = 3\n",
        "It",
        "of the package theirs is theirs:It, which is no subclass of {base}; fix or uninstall "
        "theirs",
    ),
}
"""Fault of a package -> its module, its object, and the sentence about it."""
SLOW = pytest.mark.nightly
every_fault = pytest.mark.parametrize("fault", FAULTS)
TWICE = (
    "the packages feddg-bench and theirs each have a {kind} {name}; uninstall theirs, or rename "
    "the entry point"
)


@pytest.mark.parametrize(
    ("command", "fault", "kind", "known"),
    [
        *((("methods",), fault, "method", "fedavg") for fault in FAULTS),
        (("datasets",), "import", "data set", "digits4"),
        (("data", "list"), "kind", "data set", "digits4"),
        (("data", "path"), "attribute", "data set", "digits4"),
    ],
)
def test_lists_leave_out_what_cannot_be_used_and_say_so(
    installed, feddg, fault, command, kind, known
):
    text, name, said = FAULTS[fault]
    installed("theirs", text, methods=f"mine=theirs:{name}", datasets=f"mine=theirs:{name}")
    done = feddg(*command)
    assert done.code == 0
    assert known in done.out
    assert "mine" not in done.out
    said = said.format(base="Method" if kind == "method" else "DomainDataset")
    assert done.err.startswith(f"feddg-bench: left out: the {kind} mine {said}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        *(
            pytest.param("run --method", fault, marks=() if fault == "import" else SLOW)
            for fault in FAULTS
        ),
        pytest.param("tune --trials 4 --methods", "import", marks=SLOW),
    ],
)
def test_all_methods_are_those_that_can_be_used(installed, feddg, caplog, command, fault):
    text, name, said = FAULTS[fault]
    installed("theirs", text, methods=f"mine=theirs:{name}")
    done = feddg(*command.split(), "all", "--scenario", "oc-i-p", "--dry-run")
    assert done.code == 0, done.err
    assert "FedAvg" in done.out
    (line,) = [line for line in caplog.messages if "mine" in line]
    assert line.startswith(f"left out: the method mine {said.format(base='Method')}")
    assert "theirs" not in done.out


@every_fault
def test_all_attacks_are_those_that_can_be_used(installed, feddg, caplog, fault):
    text, name, said = FAULTS[fault]
    installed("theirs", text, attacks=f"mine=theirs:{name}")
    done = feddg("attack", "--kind", "all", "--attacker", "nobody")
    one_sentence(done, "unknown attacker 'nobody'")
    (line,) = [line for line in caplog.messages if "mine" in line]
    assert line.startswith(f"left out: the attack mine {said.format(base='Attack')}")


@every_fault
def test_a_method_that_cannot_be_used_is_refused_by_name(installed, feddg, fault):
    text, name, said = FAULTS[fault]
    installed("theirs", text, methods=f"mine=theirs:{name}")
    one_sentence(feddg("run", "--method", "mine"), f"the method mine {said.format(base='Method')}")


def test_two_plugins_of_one_name_are_refused_by_name_and_else_left_out(installed, feddg, caplog):
    tiny = ("--scenario", "oc-i-p", "--rounds", 1, "--workers", 1, "data.image_size=8")
    assert feddg("run", "--method", "fedavg", *tiny).code == 0
    installed("theirs", OWN, methods="fedavg=theirs:Mine", datasets="pacs=theirs:Data")
    twice = TWICE.format(kind="method", name="fedavg")
    one_sentence(feddg("run", "--method", "FedAvg", "--dry-run"), twice)
    one_sentence(feddg("methods", "show", "fedavg"), twice)
    twice_data = TWICE.format(kind="data set", name="pacs")
    one_sentence(feddg("run", "--dataset", "pacs", "--dry-run"), twice_data)
    one_sentence(feddg("data", "check", "pacs"), twice_data)
    done = feddg("run", "--method", "all", *tiny, "--dry-run")
    assert done.code == 0
    assert "FedProx" in done.out
    assert "FedAvg" not in done.out
    assert f"the method fedavg is left out: {twice}" in caplog.messages
    for command, kind, said in (
        ("methods", "method fedavg", twice),
        ("datasets", "data set pacs", twice_data),
    ):
        done = feddg(command)
        assert done.err == f"feddg-bench: the {kind} is left out: {said}\n"
    done = feddg("tables", "all", "--format", "csv")
    assert done.code == 0
    assert "Digits4, leave two domains out" in done.out
    assert "digits4 ltdo quick: 1" in feddg("results", "list").out


def test_other_packages_of_one_name_are_both_named(installed, feddg):
    installed("theirs", OWN, methods="mine=theirs:Mine")
    installed("other", OWN, methods="mine=other:Mine")
    said = "theirs each have a method mine; uninstall all but one, or rename the entry point"
    one_sentence(feddg("run", "--method", "mine"), "the packages ", "other", said)


def test_a_package_under_an_old_and_a_new_name_is_one_plugin(installed, feddg):
    installed("theirs", OWN, methods="mine=theirs:Mine")
    installed("other", "", methods="mine=theirs:Mine")
    assert feddg("run", "--method", "mine", "--dry-run").code == 0


SHAPES = """
from feddg_bench import ImageFolderDataset
class Shapes(ImageFolderDataset):
    name, title = "shapes4", "Shapes"
    domains = ("photo", "clipart", "sketch", "chalk board")
    classes = ("circle", "square")
"""


def test_a_data_set_needs_a_name_a_title_domains_and_classes_only(installed, feddg, tmp_path):
    draw_images(tmp_path / "images", ("photo", "clipart", "sketch", "chalk board"))
    installed("theirs", SHAPES, datasets="shapes4=theirs:Shapes")
    root = ("shapes4", "--data-root", "images")
    facts = json.loads(feddg("datasets", "show", *root, "--json").out)
    assert facts["codes"] == ["p", "cl", "s", "ch"]
    assert facts["scenarios"]["lodo"][0] == "cl+s+ch-p"
    assert facts["default_recipe"] == "quick"
    assert "quick" in facts["recipes"]
    assert (facts["licence"], facts["source"]) == ("not stated", "its authors")
    for command in (("datasets",), ("datasets", "show", "shapes4"), ("data", "list")):
        done = feddg(*command)
        assert (done.code, done.err) == (0, "")
    done = feddg("data", "check", *root)
    assert done.code == 0, done.err
    assert "chalk board" in done.out
    one_sentence(feddg("data", "check", "shapes4"), "Shapes was not found", "from its authors")
    run = ("run", "--method", "fedavg", "--dataset", *root, "--protocol", "lodo", "--rounds", 1)
    assert feddg(*run, "--dry-run").code == 0
    tiny = ("--clients", 4, "--per-round", 2, "--workers", 1, "data.image_size=8")
    done = feddg(*run, "--scenario", "photo", *tiny)
    assert done.code == 0, done.err
    done = feddg("tables", "all")
    assert "Shapes, leave one domain out" in done.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'domains = ("photo")',
            "has the domains 'photo'; expected a tuple of names, such as ('pho",
        ),
        ('domains = ["photo", "sketch"]', "has the domains ['photo', 'sketch']; expected a tuple"),
        ('domains = ("photo", "photo")', "has 'photo' twice in domains; expected each name once"),
        ("classes = 2", "has the classes 2; expected a tuple of names"),
        ("del classes", "has the classes None; expected a tuple of names"),
        ("del title", "has the title None; expected a text"),
        ('name = "shapes"', "has the name 'shapes'; expected 'shapes4', as its entry point says"),
        ('counts = {"photo": (3, 4, 5)}', "has 3 counts for 'photo'; expected for each of its"),
        ('counts = {"foto": (3, 4)}', "has 2 counts for 'foto'; expected for each of its domains"),
        (
            'letters = {"photo": "p", "clipart": "p", "sketch": "s", "chalk board": "c"}',
            "has the code 'p' for the domain photo; expected one of its own",
        ),
        ('letters = {"photo": "p"}', "has the code None for the domain clipart"),
        ('domains = ("a-1", "a_1")', "has the code '1' for the domain a-1"),
    ],
)
def test_a_wrong_declaration_of_a_data_set_is_one_sentence(installed, feddg, line, said):
    installed("theirs", f"{SHAPES}    {line}\n", datasets="shapes4=theirs:Shapes")
    one_sentence(feddg("run", "--dataset", "shapes4", "--dry-run"), "the data set shapes4 ", said)


def test_a_data_set_without_its_methods_is_one_sentence(installed, feddg):
    text = SHAPES.replace("ImageFolderDataset", "DomainDataset")
    installed("theirs", text, datasets="shapes4=theirs:Shapes")
    said = "the data set shapes4 (theirs.Shapes) lacks fingerprint, read, scan, stamp; write each"
    one_sentence(feddg("run", "--dataset", "shapes4", "--dry-run"), said)


UPWARDS = """
from feddg_bench import Method
class Mine(Method):
    title = "Upwards"
    def training_step(self, batch, batch_idx):
        return -super().training_step(batch, batch_idx)
class Asserting(Method):
    def training_step(self, batch, batch_idx):
        assert batch_idx < 0
"""


@pytest.fixture
def few_checks(monkeypatch):
    """Limit the contract to two checks that need no further process."""
    few = [contract.loss_falls, contract.settings_survive_yaml]
    monkeypatch.setattr(contract, "CONTRACT", few)


@pytest.mark.usefixtures("few_checks")
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("PARDON", 0, ["passed", "loss_falls", "passed", "settings_survive_yaml", "2 of 2 checks"]),
        ("fedprox mu=0.5", 0, ["FedProx: 2 of 2 checks passed"]),
        ("mine", 1, ["FAILED", "loss_falls", "reason: the loss went from", "Upwards: 1 of 2"]),
        ("bare", 1, ["loss_falls", "AssertionError", "theirs.py, line", "1 of 2 checks passed"]),
    ],
)
def test_a_method_is_checked_by_name(installed, feddg, command, code, said):
    installed("theirs", UPWARDS, methods="mine=theirs:Mine\nbare=theirs:Asserting")
    done = feddg("methods", "check", *command.split())
    assert (done.code, done.err) == (code, "")
    place = 0
    for words in said:
        place = done.out.index(words, place)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fedprx", "unknown method 'fedprx'; did you mean 'fedprox'?"),
        ("fedprox nu=1", "unknown setting 'hyper.nu'"),
        ("fedprox mu=-1", "hyper.mu"),
    ],
)
def test_a_wrong_check_is_refused(feddg, command, said):
    one_sentence(feddg("methods", "check", *command.split()), said)
