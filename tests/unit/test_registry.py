"""Methods, data sets and recipes are found by name; wrong names get the nearest as a hint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, Field, field_validator
from torch.testing import assert_close

import feddg_methods
from feddg_bench import plugins as registry
from feddg_bench.common import files
from feddg_bench.common.errors import PluginError, SettingsError
from feddg_bench.config.layers import merge, validate
from feddg_bench.config.recipes import OTHERS, READINGS, load_recipe, read_recipe, recipe_names
from feddg_bench.config.schema import MethodSettings, RunSettings
from feddg_bench.core.method import Method
from feddg_bench.engine.construction import build_run_method
from feddg_bench.outlines import outline_of, read_outline, write_outline
from feddg_bench.plugins import (
    check_name,
    check_outline,
    load_dataset,
    load_method,
    names,
    outline,
    own_values,
)
from feddg_bench.runs.request import Request
from feddg_methods.fedavg import FedAvg
from tests.digests import outlines
from tests.helpers import no_file

METHODS = names("method")
DATASETS = names("data set")


def refusal(function, *args, kind=SettingsError, **named):
    """Return the message of an error."""
    with pytest.raises(kind) as caught:
        function(*args, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_python(script):
    """Return what a script prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout


# ---------------------------------------------------------------------------------- names


def test_our_own_plugins_are_known():
    assert {"fedavg", "fedprox", "erm", "pardon"} <= set(METHODS)
    assert {"digits4", "pacs"} <= set(DATASETS)
    assert list(METHODS) == sorted(METHODS)
    assert not {"parts", "__init__", "py"} & {*METHODS, *DATASETS}


def test_wrong_names_are_refused_with_the_nearest():
    assert load_method("Fed-Prox") is load_method("fedprox")
    assert "did you mean 'fedprox'?" in refusal(load_method, "fedpro")
    assert "unknown data set 'pac'; did you mean 'pacs'?" in refusal(load_dataset, "pac")
    assert refusal(check_name, "method", "parts").startswith("unknown method 'parts'")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_loaded(name):
    method = load_method(name)
    assert method.__module__ == f"feddg_methods.{name}"
    assert "fit" in method.uplink or method.run_round is not Method.run_round
    assert method.version >= 1
    assert (method.__doc__ or "").strip()


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_can_be_loaded(name):
    assert load_dataset(name).__module__ == f"feddg_datasets.{name}"


@pytest.fixture
def packages(tmp_path, monkeypatch, anew):
    """Load methods from a package made of the given module texts."""

    def make(**modules):
        package = tmp_path / "other_methods"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for name, text in modules.items():
            (package / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(registry._PACKAGES, "method", "other_methods")
        anew()

    yield make
    for name in [n for n in sys.modules if n.split(".")[0] == "other_methods"]:
        del sys.modules[name]


METHOD = "from feddg_bench.core.method import Method\n"


def test_a_module_defines_one_method(packages):
    packages(
        none="x = 1\n",
        imported=METHOD,
        two=METHOD + "class A(Method): ...\nclass B(Method): ...\n",
        one=METHOD + "class Mine(Method):\n    version = 7\n",
        broken="raise ImportError('an extra is missing')\n",
    )
    assert names("method") == ("broken", "imported", "none", "one", "two")
    assert load_method("one").version == 7
    for name, count in (("none", 0), ("imported", 0), ("two", 2)):
        assert refusal(load_method, name, kind=PluginError) == (
            f"other_methods.{name} defines {count} subclasses of Method; expected one"
        )


@pytest.fixture
def entered(packages, monkeypatch, anew):
    """Register ``theirs`` at a given place in a package made of the given module texts."""

    def make(place, **modules):
        packages(**modules)
        entry = EntryPoint("theirs", place, "feddg_bench.methods")
        found = {entry.group: [entry]}
        monkeypatch.setattr(registry, "entry_points", lambda *, group: found.get(group, []))
        anew()

    return make


def test_methods_of_other_packages(entered):
    entered("other_methods.one:Mine", one=METHOD + "class Mine(Method):\n    version = 7\n")
    assert names("method") == ("one", "theirs")
    assert load_method("theirs").version == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "\nimport not_there\n",
            "No module named 'not_there' (one.py, line 2)",
        ),
        ("def f(:\n", "SyntaxError: invalid syntax (one.py, line 1)"),
        ("x = 1\n", "has no attribute 'Mine'"),
        (
            "Mine = 3\n",
            "the method theirs is other_methods.one:Mine, which is no subclass of Method",
        ),
    ],
)
def test_a_method_that_cannot_be_imported_is_one_sentence(entered, text, said):
    entered("other_methods.one:Mine", one=text)
    sentence = refusal(load_method, "theirs", kind=PluginError)
    assert said in sentence
    assert "\n" not in sentence
    assert "the method theirs" in sentence


HEAD = "from feddg_bench import Method, MethodSettings\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "    Settings = dict\n",
            "Settings of the method other_methods.one.Mine is <class 'dict'>; expected",
        ),
        ("    Settings = MethodSettings()\n", "Settings of the method other_methods.one.Mine is "),
        (
            "    def __init__(self, size):\n        super().__init__()\n",
            "__init__ that does not take what Method takes (got an unexpected keyword argument",
        ),
        (
            "    uplink = {'fit': ('weights')}\n",
            "uplink['fit'] of the method other_methods.one.Mine is 'weights'; expected a tuple of "
            "names, such as ('weights',)",
        ),
        (
            "    downlink = 'style'\n",
            "downlink of the method other_methods.one.Mine is 'style'; expected a tuple of names, "
            "such as ('style',)",
        ),
        ("    local = ['head.']\n", "local of the method other_methods.one.Mine is ['head.']; "),
        ("    tasks = (1,)\n", "tasks of the method other_methods.one.Mine is (1,); expected"),
        ("    version = 1.5\n", "version of the method other_methods.one.Mine is 1.5; expected a"),
        ("    version = '1'\n", "version of the method other_methods.one.Mine is '1'; expected a"),
        ("    version = None\n", "version of the method other_methods.one.Mine is None; expect"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_when_it_is_loaded_or_planned(entered, body, said):
    entered("other_methods.one:Mine", one=HEAD + "class Mine(Method):\n" + body)
    assert said in refusal(load_method, "theirs", kind=PluginError)
    assert said in refusal(Request(method="theirs").plan, check=False, kind=PluginError)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("    def build(self):\n        self.head = nn.Linear(2)\n", 5),
        (
            "    def __init__(self, *args, **values):\n"
            "        self.head = nn.Linear(2, 2)\n"
            "        super().__init__(*args, **values)\n",
            5,
        ),
    ],
)
def test_a_class_that_cannot_be_built_names_its_line(
    entered, toy_settings, toy_federation, body, line
):
    text = f"from torch import nn\n{HEAD}class Mine(Method):\n{body}"
    entered("other_methods.one:Mine", one=text)
    settings = toy_settings({"method": "theirs"})
    with pytest.raises((TypeError, AttributeError)) as caught:
        build_run_method(settings, toy_federation)
    assert caught.value.__notes__ == ["build of Mine"]
    own = [place for place in caught.traceback if place.path.name == "one.py"]
    assert own[-1].lineno + 1 == line


def test_a_module_that_is_not_there_is_named_and_has_no_place(entered):
    entered("not_there_at_all:Mine")
    sentence = refusal(load_method, "theirs", kind=PluginError)
    assert sentence.endswith("ModuleNotFoundError: No module named 'not_there_at_all'")


# ---------------------------------------------------------------------- without PyTorch

OUTLINES = """
import json, sys
from feddg_bench.plugins import names, outline, own_values
print(json.dumps({name: write_outline(outline(name)) for name in names('method')}))
print(json.dumps([own_values('pardon', {'preset': 'paper'}), own_values('fedprox', {'mu': 1})]))
assert not {'torch', 'feddg_methods.pardon'} & {*sys.modules}
"""


def test_an_outline_says_what_the_class_does_and_needs_no_torch():
    script = f"from feddg_bench.outlines import write_outline\n{OUTLINES}"
    outlined, own = map(json.loads, run_python(script).splitlines())
    assert outlined == {name: write_outline(outline_of(load_method(name))) for name in METHODS}
    given = {"pardon": {"preset": "paper"}, "fedprox": {"mu": 1}}
    assert own == [checked(load_method(name).Settings, each) for name, each in given.items()]


def checked(model, given):
    """Return every value for those given, as a class says."""
    return model.model_validate(given).model_dump(mode="json")


VALUES = [
    None,
    True,
    0,
    1,
    3,
    -0.0,
    0.25,
    0.5,
    1.0,
    1.5,
    float("nan"),
    1e400,
    10**400,
    "none",
    "0.5",
    "a",
]


def values_of(setting):
    return st.sampled_from([*VALUES, setting.default, [], ["a"], *setting.kind.split(" | ")])


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
def test_an_outline_gives_the_values_of_the_class_or_leaves_them_to_it(name, data):
    own, model = outline(name).own, load_method(name).Settings
    each = {name: values_of(setting) for name, setting in own.settings.items()}
    hyper = data.draw(st.fixed_dictionaries({}, optional=each))
    values = own.values(hyper)
    if values is not None:
        assert json.dumps(values) == json.dumps(checked(model, hyper))
    assert json.dumps(own.values({})) == json.dumps(checked(model, {}))


@pytest.mark.parametrize(
    ("name", "hyper", "sentence"),
    [
        ("fedprox", {"mu": -1, "mx": 1}, "unknown setting 'hyper.mx'; did you mean 'hyper.mu'?"),
        ("fedprox", {"mu": -1}, "setting hyper.mu: -1 is not valid: input should be greater than"),
        ("ccst", {"transfer": "cached", "selection": "pass"}, "needs styles that stay"),
    ],
)
def test_a_wrong_setting_is_refused_as_the_class_does(name, hyper, sentence):
    assert outline(name).own.values(hyper) is None
    told = refusal(own_values, name, hyper)
    assert sentence in told
    assert told == refusal(validate, load_method(name).Settings, hyper, "hyper.")


def test_the_outlines_on_file_are_of_todays_source():
    """`make digests` writes them; without them, every list imports all methods."""
    file = Path(feddg_methods.__file__).with_name(registry.OUTLINES)
    assert json.loads(file.read_text()) == outlines()


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_has_a_meaning(name):
    fields = load_method(name).Settings.model_fields
    assert not [key for key, field in fields.items() if not field.description]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Install a package with one method; return a function that reads its outline."""
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[feddg_bench.methods]\ntheirs = theirs:Theirs\n")

    def facts(text):
        (tmp_path / "theirs.py").write_text(text)
        return run_python(
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            "from feddg_bench.plugins import outline\n"
            "method = outline('theirs')\n"
            "print(method.version, *method.own.settings, 'torch' in sys.modules)\n"
        ).split()

    return facts


THEIRS = """
import torch
from feddg_bench import Method, MethodSettings
class Own(MethodSettings):
    mu: float = 0.1
class Theirs(Method):
    Settings = Own
    version = 7
"""


@pytest.mark.nightly
def test_a_method_of_another_package_is_imported_when_its_source_is_new(theirs):
    assert theirs(THEIRS) == ["7", "mu", "True"]
    assert theirs(THEIRS) == ["7", "mu", "False"]
    changed = THEIRS.replace("mu", "nu").replace("7", "8")
    assert theirs(changed) == ["8", "nu", "True"]
    assert theirs(changed) == ["8", "nu", "False"]


class Plain(MethodSettings):
    width: int | None = Field(None, ge=1)
    sizes: tuple[int, ...] = (3,)
    kind: Literal["a", "b"] = "a"


class Own(Plain):
    @field_validator("kind")
    @classmethod
    def _lower(cls, value):
        return str(value).lower()


class Even(Plain):
    width: Annotated[int, AfterValidator(lambda value: value - value % 2)] = 4


class Drawn(Plain):
    sizes: list[int] = Field(default_factory=lambda: [1])


class Mixed(Plain):
    kind: Literal["a", 2] = 2


def test_settings_with_code_of_their_own_are_not_on_file():
    found = {
        kind: outline_of(FedAvg.__class__(kind.__name__, (FedAvg,), {"Settings": kind}))
        for kind in (Plain, Own, Even, Drawn, Mixed)
    }
    kept = {kind: write_outline(outline) for kind, outline in found.items()}
    assert [kind for kind, written in kept.items() if written is None] == [Own, Even, Drawn, Mixed]
    assert read_outline(json.loads(json.dumps(kept[Plain]))) == found[Plain]
    own = found[Plain].own
    for hyper, values in (
        ({"width": None, "kind": "b"}, {"width": None, "sizes": [3], "kind": "b"}),
        ({"width": 2}, {"width": 2, "sizes": [3], "kind": "a"}),
        *(({"width": two}, {"width": 2, "sizes": [3], "kind": "a"}) for two in ("2", 2.0)),
        ({"width": "none", "sizes": [4]}, {"width": None, "sizes": [4], "kind": "a"}),
        *(({name: wrong}, None) for name, wrong in WRONG),
    ):
        assert own.values(hyper) == values
        assert found[Own].own.values(hyper) is None


WRONG = [
    *[("width", wrong) for wrong in (0, True, "a", 2.5)],
    *[("kind", wrong) for wrong in ("c", "a | b", 2, None)],
    *[("sizes", wrong) for wrong in ("a", 3, [2.5])],
    ("size", 3),
]
"""Names and values that the class of settings refuses."""


def test_a_run_that_was_planned_by_an_old_outline_is_refused_once(tmp_path, monkeypatch, anew):
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path))
    anew()
    old = replace(outline("fedavg"), version=0)
    registry._keep(registry._where("method", "fedavg"), old)
    anew()
    assert outline("fedavg").version == 0
    assert "give the same command again" in refusal(
        check_outline, "fedavg", FedAvg, kind=PluginError
    )
    assert outline("fedavg").version == FedAvg.version
    check_outline("fedavg", FedAvg)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"doc": 1}'])
def test_an_outline_that_cannot_be_read_is_made_anew(tmp_path, monkeypatch, anew, content):
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path))
    file = registry._on_file(registry._where("method", "fedavg"))
    file.parent.mkdir()
    file.write_bytes(content)
    anew()
    assert outline("fedavg").title == "FedAvg"


# -------------------------------------------------------------------------------- building


def test_initial_weights_depend_on_seed_and_backbone_alone(toy_settings, toy_federation):
    def weights(name, **values):
        return build_run_method(
            toy_settings({"method": name, **no_file(name)}, values), toy_federation
        ).state.federated_weights()

    first = weights("fedavg")
    for name in ("fedprox", "pardon", "erm"):
        assert_close(weights(name, train={"lr": 0.3}), first, rtol=0, atol=0)
    other = weights("fedavg", seed=1)
    assert not torch.equal(other["classifier.weight"], first["classifier.weight"])


def test_building_leaves_the_global_generator_alone(toy_settings, toy_federation):
    before = torch.get_rng_state()
    build_run_method(toy_settings(), toy_federation)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_classifier_has_one_output_a_class(toy_settings, toy_federation):
    federation = replace(toy_federation, num_classes=5)
    assert build_run_method(toy_settings(), federation).classifier.out_features == 5


def test_settings_of_the_method_are_checked(toy_settings, toy_federation):
    settings = toy_settings({"method": "fedprox", "hyper": {"mew": 1}})
    assert "did you mean 'hyper.mu'?" in refusal(build_run_method, settings, toy_federation)
    settings = toy_settings({"method": "fedprox", "hyper": {"mu": -1}})
    assert refusal(build_run_method, settings, toy_federation).startswith(
        "setting hyper.mu: -1 is not valid"
    )
    settings = toy_settings({"hyper": {"mu": 1}})
    assert refusal(build_run_method, settings, toy_federation).startswith(
        "unknown setting 'hyper.mu'"
    )


# --------------------------------------------------------------------------------- recipes

RECIPE = {
    "description": "ours",
    "settings": {"train": {"lr": 1.0, "eps": 1.0, "momentum": 0.1}},
    "methods": {"fedprox": {"hyper": {"mu": 5.0}, "train": {"momentum": 0.5}}},
    "datasets": {
        "pacs": {
            "train": {"lr": 2.0, "momentum": 0.2},
            "methods": {"fedprox": {"hyper": {"mu": 6.0}}, "pardon": {"train": {"eps": 3.0}}},
        },
        "digits4": None,
    },
}


@pytest.fixture
def recipe(tmp_path):
    def write(content):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def test_what_is_more_specific_wins(recipe):
    path = recipe(RECIPE)
    assert merge(*load_recipe(path, "pacs", "fedavg")) == {
        "train": {"lr": 2.0, "eps": 1.0, "momentum": 0.2},
    }
    assert merge(*load_recipe(path, "pacs", "fedprox")) == {
        "train": {"lr": 2.0, "eps": 1.0, "momentum": 0.5},
        "hyper": {"mu": 6.0},
    }
    assert merge(*load_recipe(path, "pacs", "pardon"))["train"]["eps"] == 3.0
    assert merge(*load_recipe(path, "digits4", "fedprox"))["hyper"] == {"mu": 5.0}


def test_a_recipe_may_be_short(recipe):
    assert load_recipe(recipe({"datasets": {"pacs": None}}), "pacs", "fedavg") == ({}, {})


def test_a_recipe_takes_short_and_dotted_keys_as_a_settings_file_does(recipe):
    words = {"rounds": 3, "train.lr": 0.5, "backbone": {"name": "small_cnn"}}
    frame = {"clients": 7, "methods": {"fedprox": {"lr": 0.25}}}
    common, own = load_recipe(
        recipe({"settings": words, "datasets": {"digits4": frame}}), "digits4", "fedprox"
    )
    assert common["federation"] == {"rounds": 3}
    assert common["partition"] == {"clients": 7}
    assert common["train"] == {"lr": 0.5}
    assert own == {"train": {"lr": 0.25}}


def test_a_recipe_file_with_a_shipped_name_is_refused(recipe, tmp_path):
    path = recipe({"datasets": {"digits4": {}}})
    (tmp_path / "laptop.yaml").write_text(Path(path).read_text())
    text = refusal(load_recipe, str(tmp_path / "laptop.yaml"), "digits4", "fedavg")
    assert "rename the file, such as to my-laptop.yaml" in text


def shipped_cases():
    for name in recipe_names():
        for dataset in read_recipe(name).datasets or {}:
            yield name, dataset


@pytest.mark.parametrize(("name", "dataset"), list(shipped_cases()))
def test_shipped_recipes_are_valid_for_every_method(name, dataset):
    if dataset != OTHERS:
        check_name("data set", dataset)
    for method in METHODS:
        chosen = {"method": method, "dataset": dataset, "scenario": "any"}
        cls = load_method(method)
        for readings in READINGS:
            base, own = load_recipe(name, dataset, method, readings)
            settings = validate(RunSettings, merge(base, cls.needs, own, chosen))
            validate(cls.Settings, settings.hyper, "hyper.")


def test_recipes_are_found_in_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "feddg_bench"
    recipes = package / "shipped" / "sweeps" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "theirs.yaml").write_text("{}")
    monkeypatch.setattr(files, "__file__", str(package / "common" / "files.py"))
    assert recipe_names() == ("theirs",)
