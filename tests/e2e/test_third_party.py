"""A third-party method: created by a command, installed, found by name, held to the contract."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import feddg_bench as fb
from feddg_bench import testing
from feddg_bench.cli.lists import EXAMPLES, write_plugin
from feddg_bench.common.errors import SettingsError
from feddg_bench.testing import contract
from tests.helpers import refused

pytestmark = pytest.mark.nightly

EXAMPLE = Path(__file__).parents[1] / "example_plugin"


every_kind = pytest.mark.parametrize("kind", EXAMPLES)


@every_kind
def test_a_new_package_is_the_example_under_another_name(tmp_path, kind):
    example = EXAMPLES[kind]
    for path in write_plugin("my_own", tmp_path, kind):
        meant = EXAMPLE / path.name.replace("my_own", example)
        text = meant.read_text().replace("fedclip", "my_own").replace(example, "my_own")
        assert path.read_text() == text.replace(example.capitalize(), "MyOwn")
        assert example not in path.read_text().lower()


def test_the_command_takes_a_kind_and_refuses_others(feddg, tmp_path):
    done = feddg("methods", "new", "mine", "--kind", "style", "--dir", "there")
    assert done.code == 0
    assert 'group = "style"' in (tmp_path / "there/mine.py").read_text()
    done = feddg("methods", "new", "mine", "--kind", "styles", "--dir", "here")
    assert done.code == 2
    assert "unknown kind of method 'styles'; did you mean 'style'?" in done.err
    assert not (tmp_path / "here").exists()


def test_the_default_kind_changes_the_server(feddg, tmp_path):
    assert feddg("methods", "new", "mine").code == 0
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


@pytest.mark.parametrize("name", ["FedClip", "fed-clip", "1clip", "", "fed clip", "../clip"])
def test_names_that_no_module_can_have(name, tmp_path):
    with refused(SettingsError, "cannot name a method"):
        write_plugin(name, tmp_path)


@pytest.mark.parametrize("name", ["class", "torch", "json"])
def test_names_that_would_hide_a_module(name, tmp_path):
    with refused(SettingsError, f"a file {name}.py would hide", f"my_{name}"):
        write_plugin(name, tmp_path)


def test_a_name_that_is_taken(tmp_path):
    with refused(SettingsError, "there is a method 'fedavg' already"):
        write_plugin("fedavg", tmp_path)


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "test_fedclip.py").write_text("mine")
    with refused(SettingsError, "is there already"):
        write_plugin("fedclip", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_fedclip.py"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return the folder where the example package is installed."""
    if find_spec("pip") is None or find_spec("hatchling") is None:
        pytest.skip("needs pip and hatchling")
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", place, EXAMPLE], check=True, capture_output=True)
    return place


@pytest.fixture
def installed(package, monkeypatch, anew):
    """Install the example package in addition to the project, for this test."""
    monkeypatch.syspath_prepend(package)
    anew()
    yield
    sys.modules.pop("fedclip", None)


@pytest.mark.usefixtures("installed")
def test_it_is_found_and_runs_by_name_in_two_processes(feddg):
    found = {entry["name"]: entry for entry in json.loads(feddg("methods", "--json").out)}
    assert found["fedclip"]["settings"] == {"bound": 1.0}
    tiny = ("--rounds", 1, "--clients", 4, "--per-round", 2, "--scenario", "oc-i-p")
    run = ("run", "--method", "fedclip", *tiny, "--workers", 2, "data.image_size=8", "--json")
    done = feddg(*run)
    assert done.code == 0, done.err
    (record,) = json.loads(done.out)["runs"]
    assert record["method"] == "fedclip"
    assert record["settings"]["hyper"] == {"bound": 1.0}


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


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return a folder with a new package of each kind."""
    folder = tmp_path_factory.mktemp("begun")
    for kind in EXAMPLES:
        write_plugin(f"new_{kind}", folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def pool(begun):
    """Let the contract's two processes find all new packages; starting new processes takes long."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in EXAMPLES:
            patch.syspath_prepend(begun / kind)
        contract._pool.cache_clear()
        contract._pool()
        yield
        contract._pool.cache_clear()


@pytest.mark.usefixtures("pool")
@every_kind
def test_the_tests_of_a_new_package_pass(capfd, begun, kind):
    """They run in this process, since importing PyTorch in a new one takes long."""
    off = [f"-pno:{plugin}" for plugin in ("cacheprovider", "faulthandler", "xdist")]
    status = pytest.main(["-q", *off, f"--rootdir={begun / kind}", str(begun / kind)])
    out, err = capfd.readouterr()
    assert status == 0, out
    assert f"New{kind.capitalize()}, 1 of {len(contract.CONTRACT)}: " in err
    assert " passed in " in err
