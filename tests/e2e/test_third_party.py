"""A third-party method: created by a command, installed, found by name, held to the contract."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

import feddg_bench as fb
from feddg_bench import testing
from feddg_bench.cli.templates import EXAMPLES, write_method
from feddg_bench.common.errors import SettingsError
from feddg_bench.plugins import GROUPS, check_declared
from tests.helpers import refused

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


@every_kind
@pytest.mark.parametrize(
    ("name", "module", "title"),
    [
        ("mine", "mine", "Mine"),
        ("my_own", "my_own", "MyOwn"),
        ("my-own-2", "my_own_2", "MyOwn2"),
        ("FedX", "fedx", "FedX"),
        ("F2", "f2", "F2"),
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


@every_kind
def test_an_example_imports_public_names_only(kind):
    for path in (EXAMPLE / f"{EXAMPLES[kind]}.py", EXAMPLE / f"test_{EXAMPLES[kind]}.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("feddg") for name in node.names)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("feddg_"):
                public = {"feddg_bench": fb, "feddg_bench.testing": testing}[node.module]
                assert all(hasattr(public, name.name) for name in node.names)


def test_a_new_method_is_short():
    lines = (EXAMPLE / "fedclip.py").read_text().splitlines()
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
    (tmp_path / "test_fedclip.py").write_text("mine")
    with refused(SettingsError, "is there already"):
        write_method("fedclip", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_fedclip.py"]


class Environment:
    """A virtual environment with the tested tree and packages that are written and installed."""

    def __init__(self, place):
        self.place, self.python = place, place / "env/bin/python"
        venv.create(place / "env", with_pip=False)
        (site,) = (place / "env/lib").glob("python*/site-packages")
        ours = [Path(path).absolute() for path in sys.path if path and Path(path).is_dir()]
        (site / "tested.pth").write_text("\n".join(map(str, ours)))

    def run(self, *words):
        """Return the output of a command; the rest of the error is shown if it fails."""
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"FEDDG_CACHE": str(self.place / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [self.python, "-m", *map(str, words)],
            cwd=self.place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def install(self, *folders):
        """Install packages as their authors do, without downloads."""
        self.run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *folders)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return an environment with a new package of each kind, begun by the command."""
    if find_spec("pip") is None or find_spec("hatchling") is None:
        pytest.skip("needs pip and hatchling")
    made = Environment(tmp_path_factory.mktemp("authors"))
    for kind in EXAMPLES:
        made.run("feddg_bench", "methods", "new", f"New-{kind}", "--kind", kind)
    made.install(*(f"./new_{kind}" for kind in EXAMPLES))
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
@every_kind
def test_the_tests_of_a_new_package_pass(environment, kind):
    out = environment.run("pytest", "-q", "-p", "no:cacheprovider", f"new_{kind}")
    assert " passed in " in out


@pytest.fixture
def broken(tmp_path, monkeypatch, anew):
    """Install a package whose method and data set cannot be imported, for this test."""
    (tmp_path / "theirs.py").write_text("\nraise ImportError('an extra is missing')\n")
    info = tmp_path / "their_pkg-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-pkg\nVersion: 1\n")
    entries = [f"[feddg_bench.{kind}]\ntheirs = theirs:It\n" for kind in ("methods", "datasets")]
    (info / "entry_points.txt").write_text("".join(entries))
    monkeypatch.syspath_prepend(tmp_path)
    anew()


WHY = "theirs of the package their-pkg cannot be imported: ImportError: an extra is missing"


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("command", "kind", "known"),
    [
        (("methods",), "method", "fedavg"),
        (("datasets",), "data set", "digits4"),
        (("data", "list"), "data set", "digits4"),
        (("data", "path"), "data set", "digits4"),
    ],
    ids=["methods", "datasets", "data list", "data path"],
)
def test_lists_leave_out_what_cannot_be_imported_and_say_so(feddg, command, kind, known):
    done = feddg(*command)
    assert done.code == 0
    assert known in done.out
    assert "theirs" not in done.out
    assert done.err.startswith(f"feddg-bench: the {kind} theirs is left out: the {kind} {WHY}")
    assert done.err.count("\n") == 1


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("command", [("run", "--method"), ("tune", "--methods")], ids=" ".join)
def test_all_methods_are_refused_if_one_cannot_be_imported(feddg, command):
    done = feddg(*command, "all")
    assert (done.code, done.out) == (2, "")
    assert f"the method {WHY} (theirs.py, line 2); mend or uninstall that package" in done.err
    assert "name the methods that are wanted" in done.err
    assert "Traceback" not in done.err
