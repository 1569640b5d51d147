"""Sweep files: W&B's format as the suite reads it, and the shipped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.plugins import load_method, names
from feddg_bench.runs.request import Datasets
from feddg_bench.sweeps.definition import Choice, Range, load_ranges, load_sweep
from feddg_bench.sweeps.jobs import jobs
from feddg_bench.sweeps.search import open_search
from tests.helpers import refused

FOLDER = Path(__file__).parents[2] / "sweeps"
FILES = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("tune/*.yaml")])
COMMAND = ["${env}", "${program}", "run", "${args_no_hyphens}"]


def write(path: Path, **layer: Any) -> Path:
    base = {"program": "feddg-bench", "command": COMMAND, "method": "grid"}
    path.write_text(yaml.safe_dump(base | layer, sort_keys=False))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sweep.yaml"


# ------------------------------------------------------------------------ the shipped files


def test_a_shipped_file_may_be_given_by_its_name():
    assert load_sweep(Path("ltdo")) == load_sweep(FOLDER / "ltdo.yaml")
    assert load_sweep(Path("tune/fedavg")) == load_sweep(FOLDER / "tune/fedavg.yaml")
    with refused(SettingsError, "did you mean 'ltdo'"):
        load_sweep(Path("ltod"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_wandb_accepts_the_file(path: Path) -> None:
    sweeps = pytest.importorskip("sweeps", reason="W&B's schema is in its package `sweeps`")
    if not hasattr(sweeps, "schema_violations_from_proposed_config"):  # the project's own folder
        pytest.skip("W&B's schema is in its package `sweeps`")
    assert sweeps.schema_violations_from_proposed_config(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_agent_calls_run_with_the_same_pairs(path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.sdk.launch.sweeps import utils

    sweep = load_sweep(path)
    point = {
        name: p.low if isinstance(p, Range) else p.values[-1]
        for name, p in sweep.parameters.items()
    }
    layer = yaml.safe_load(path.read_text())
    args = {name: {"value": value} for name, value in point.items()}
    filled = utils.create_sweep_command_args({"args": args})
    filled |= {"program": [layer["program"]], "env": ["/usr/bin/env"]}
    words: list[str] = []
    for word in utils.create_sweep_command(layer["command"]):  # as the agent fills it
        words += filled[word[2:-1]] if word.startswith("${") else [word]
    assert words[:3] == ["/usr/bin/env", "feddg-bench", "run"]
    assert words[3:] == ["--wandb", "online", *sweep.pairs(point)]


FOR_FEATURES = {"fedclip", "ncm", "ridge", "zeroshot"}
"""Methods for frozen features, which sweeps over images leave out."""


def test_every_method_has_a_search_that_it_accepts(tmp_path: Path) -> None:
    found = {path.stem for path in FOLDER.glob("tune/*.yaml")}
    own = {
        name
        for name in names("method")
        if (FOLDER.parent / f"methods/feddg_methods/{name}.py").exists()
    } - {"ncm", "zeroshot"}  # which have no setting
    assert found == own, "write sweeps/tune/<method>.yaml"
    for name in sorted(own):
        sweep = load_sweep(FOLDER / f"tune/{name}.yaml")
        assert sweep.parameters["method"] == Choice((name,))
        settings = load_method(name).Settings
        defaults = settings().model_dump()
        for parameter, space in sweep.parameters.items():
            section, _, key = parameter.partition(".")
            if section != "hyper":
                continue
            values = (space.low, space.high) if isinstance(space, Range) else space.values
            for value in values:
                validate(settings, {key: value}, "hyper.")
            if isinstance(space, Range):
                assert space.low <= defaults[key] <= space.high, f"{name}: {key}"
            else:
                assert defaults[key] in values, f"{name}: {key}"
        open_search(sweep, tmp_path)  # both ends of every range are valid


@pytest.mark.parametrize(
    ("name", "count"),
    [("ablation", 60), ("perturbation", 36), ("clients", 5), ("lambda", 16), ("ltdo", 12)],
)
def test_sizes_for_pardon(name: str, count: int, tmp_path: Path) -> None:
    found = open_search(load_sweep(FOLDER / f"{name}.yaml", ["method=pardon"]), tmp_path).jobs()
    assert len({job.key for job in found}) == len(found) == count


def test_tables_of_all_methods_have_all_methods() -> None:
    own = {path.stem for path in (FOLDER.parent / "methods/feddg_methods").glob("[a-z]*.py")} - {
        "functional"
    }
    for name, missing in (
        ("ltdo", set()),
        ("lodo", set()),
        ("lambda", {"erm"}),
        ("clients", {"erm"}),
    ):
        method = load_sweep(FOLDER / f"{name}.yaml").parameters["method"]
        assert isinstance(method, Choice)
        assert set(method.values) == own - missing - FOR_FEATURES, f"sweeps/{name}.yaml"


def test_bounds_are_numbers_as_everywhere(file: Path) -> None:
    file.write_text(
        'method: grid\ncommand: [run, "${args_no_hyphens}"]\n'
        "parameters: {lr: {distribution: log_uniform_values, min: 1e-5, max: 1E-2}}"
    )
    assert load_sweep(file).parameters["lr"] == Range(1e-5, 1e-2, log=True)


def test_a_validation_domain_chooses_for_ltdo_only(tmp_path: Path) -> None:
    with refused(SettingsError, "no validation domain for val/accuracy; choose by id_"):
        open_search(
            load_sweep(FOLDER / "tune/fedavg.yaml", ["protocol=lodo", "scenario=ipc-o"]), tmp_path
        )


# ------------------------------------------------------------------------------- reading


def test_grid_in_the_order_of_the_file(file: Path) -> None:
    parameters = {"method": {"values": ["a", "b"]}, "x": {"min": 1, "max": 2}, "y": {"value": 1e-5}}
    sweep = load_sweep(write(file, parameters=parameters))
    assert [sweep.pairs(point) for point in sweep.points()] == [
        ["method=a", "x=1", "y=1e-05"],
        ["method=a", "x=2", "y=1e-05"],
        ["method=b", "x=1", "y=1e-05"],
        ["method=b", "x=2", "y=1e-05"],
    ]


def test_a_grid_ends_at_its_run_cap(file: Path) -> None:
    sweep = load_sweep(write(file, run_cap=3, parameters={"x": {"min": 1, "max": 9}}))
    assert [point["x"] for point in sweep.points()] == [1, 2, 3]


def test_pairs_replace_what_the_file_says(file: Path) -> None:
    parameters = {"train.lr": {"values": [0.1, 0.2]}, "seed": {"value": 0}}
    sweep = load_sweep(write(file, parameters=parameters), ["lr=0.5", "seed=1,2", "rounds=3"])
    assert [sweep.pairs(point) for point in sweep.points()] == [
        ["train.lr=0.5", "seed=1,2", "rounds=3"]
    ]


@pytest.mark.parametrize(
    ("pair", "values"),
    [
        ("lr=0.1, 0.2", ("0.1", "0.2")),
        ("hyper.mu=0.1,1", ("0.1", "1")),
        ("encoder=mobilenet_v2+tf,efficientnet_lite0", ("mobilenet_v2+tf", "efficientnet_lite0")),
        ("augment.crop_scale=[0.8, 1]", ("[0.8, 1]",)),
        ("hyper={mu: 0.1, norm: l2}", ("{mu: 0.1, norm: l2}",)),
        ("backbone.weights='a,b.pt'", ("'a,b.pt'",)),
        ("seed=0-2,5", ("0-2,5",)),  # `run` reads it
    ],
)
def test_commas_in_a_pair_part_values(file: Path, pair: str, values: tuple[str, ...]) -> None:
    parameters = {"method": {"value": "fedprox"}}
    sweep = load_sweep(write(file, parameters=parameters), [pair])
    assert list(sweep.parameters.values())[1:] == [Choice(values)]


def test_random_points_repeat_and_go_on(file: Path) -> None:
    parameters = {
        "a": {"distribution": "log_uniform_values", "min": 0.001, "max": 10.0},
        "b": {"min": 0.0, "max": 1.0},
        "c": {"min": 1, "max": 3},
        "d": {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25},
        "e": {"values": ["x", "y"], "probabilities": [0.9, 0.1]},
    }
    short = load_sweep(write(file, method="random", run_cap=20, parameters=parameters))
    first = list(short.points())
    assert first == list(short.points())
    long = load_sweep(write(file, method="random", run_cap=400, parameters=parameters))
    points = list(long.points())
    assert points[:20] == first
    assert long.id == short.id
    assert all(0.001 <= p["a"] <= 10 and 0 <= p["b"] < 1 for p in points)
    assert 0.4 < sum(p["a"] < 0.1 for p in points) / 400 < 0.6  # half of the decades
    assert {p["c"] for p in points} == {1, 2, 3}
    assert {p["d"] for p in points} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert 0.85 < sum(p["e"] == "x" for p in points) / 400 < 0.95


def test_multiples_of_q() -> None:
    """W&B's rule; 0.1 + 0.2 must not show in keys."""
    fifths = Range(0.05, 0.95, step=0.1)
    places = (0.0, 0.25, 0.5, 0.999)
    assert [fifths.draw(place) for place in places] == [0.0, 0.3, 0.5, 0.9]
    assert {Range(1.0, 9.0, step=2.0).draw(n / 100) for n in range(100)} == {0, 2, 4, 6, 8}


@pytest.mark.parametrize(
    ("name", "spec", "told"),
    [
        ("hyper.mu", {"min": 0, "max": 1}, True),
        ("lambda", {"min": 0, "max": 1}, True),
        ("world.q", {"min": 0, "max": 1}, True),
        ("hyper.mu", {"min": 0, "max": 1, "distribution": "uniform"}, False),
        ("hyper.mu", {"min": 0, "max": 1, "distribution": "int_uniform"}, False),
        ("hyper.mu", {"min": 0.0, "max": 1.0}, False),
        ("rounds", {"min": 1, "max": 9}, False),
        ("federation.per_round", {"min": 1, "max": 9}, False),
    ],
    ids=str,
)
def test_whole_bounds_of_a_setting_that_takes_fractions_are_told(
    file: Path, caplog: pytest.LogCaptureFixture, name: str, spec: dict[str, Any], *, told: bool
) -> None:
    named = {"method": {"values": ["fedavg", "fedprox"]}, "dataset": {"value": "planted_tint"}}
    write(file, method="random", run_cap=6, parameters={**named, name: spec})
    load_sweep(file)
    said = (
        f"{file}: the bounds of {name} are whole, so W&B and `sweep` draw whole numbers only; for "
        f"all numbers from 0 to 1 add distribution: uniform"
    )
    assert caplog.messages == [said] * told
    caplog.clear()
    load_ranges(write(file.with_stem("fedprox"), parameters={"hyper.mu": {"min": 0, "max": 1}}))
    assert len(caplog.messages) == 1
    caplog.clear()
    load_sweep(write(file, parameters={"hyper.mu": {"min": 0, "max": 1}}))  # a grid of both
    assert not caplog.messages


GOOD: dict[str, Any] = {"parameters": {"seed": {"values": [0, 1]}}}


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"method": "gird"}, "did you mean 'grid'"),
        ({"parametres": {}}, "did you mean 'parameters'"),
        ({"parameters": {}}, "parameters must hold"),
        ({"parameters": {"a": 1}}, "parameter a must be"),
        ({"parameters": {"a": {"values": []}}}, "values must be a list"),
        ({"parameters": {"a": {"value": None}}}, "does not survive"),
        ({"parameters": {"hyper": {"parameters": {"mu": {"value": 1}}}}}, "write hyper.NAME"),
        ({"parameters": {"a": {"distribution": "normal"}}}, "unknown distribution 'normal'"),
        ({"parameters": {"a": {"distribution": "log_uniform"}}}, "write log_uniform_values"),
        ({"parameters": {"a": {"min": 2, "max": 1}}}, "min <= max"),
        ({"parameters": {"a": {"min": 0.0, "max": 1.0}}}, "no list of values for a grid"),
        (
            {"parameters": {"a": {"distribution": "log_uniform_values", "min": 0, "max": 1}}},
            "above 0",
        ),
        ({"parameters": {"a": {"values": [1, 2], "probabilities": [1]}}}, "2 numbers"),
        ({"command": "feddg-bench run"}, "the command must hand KEY=VALUE to `run`"),
        ({"command": ["feddg-bench", "run", "${args}"]}, "the command must hand"),
        ({"command": [*COMMAND, "--rounds", "3"]}, "'--rounds' where KEY=VALUE"),
        ({"method": "random"}, "add run_cap"),
        ({"method": "bayes", "run_cap": 3}, "needs metric"),
        ({"run_cap": 0}, "run_cap must be"),
        ({"early_terminate": {"type": "hyperband"}}, "remove it"),
        ({"metric": {"name": "test/accuracy", "goal": "maximize"}}, "test metric"),
        ({"metric": {"name": "id_test/accuracy", "goal": "maximize"}}, "test metric"),
        ({"metric": {"name": "val/acc", "goal": "maximize"}}, "did you mean 'val/accuracy'"),
        ({"metric": {"name": "val/accuracy"}}, "needs goal"),
        (
            {"parameters": {"lr": {"value": 1}, "train.lr": {"value": 2}}},
            "lr and train.lr set the same",
        ),
        ({"parameters": {"seed": {"value": 1}, "seeds": {"value": 2}}}, "seed and seeds set"),
        (
            {"command": ["run", "lr=1", COMMAND[-1]], "parameters": {"train.lr": {"value": 1}}},
            "lr and train.lr set the same",
        ),
    ],
)
def test_bad_files_are_one_sentence(file: Path, layer: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        list(load_sweep(write(file, **(GOOD | layer))).points())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_command_is_only_for_agents_of_wandb(file: Path) -> None:
    without = {name: value for name, value in GOOD.items() if name not in ("command", "program")}
    bare = load_sweep(write(file, **without))
    assert bare == load_sweep(write(file, **GOOD))
    assert bare.fixed == ()


@pytest.mark.parametrize(
    "tracking", [["--wandb", "online"], ["--wandb=offline", "--wandb-project", "mine"]]
)
def test_fixed_pairs_of_the_command(file: Path, tracking: list[str]) -> None:
    command = ["feddg-bench", "run", "method=fedprox", *tracking, "${args_no_hyphens}"]
    sweep = load_sweep(write(file, command=command, **GOOD))
    assert sweep.fixed == ("method=fedprox",)


# ---------------------------------------------------------------------------------- jobs


def test_a_point_is_the_runs_of_the_command() -> None:
    found = jobs(["method=fedavg,fedprox", "seed=0,1", "scenario=ip-o-c", "rounds=2"], Datasets())
    assert [job.title for job in found] == [
        "FedAvg ltdo ip-o-c seed 0",
        "FedProx ltdo ip-o-c seed 0",
        "FedAvg ltdo ip-o-c seed 1",
        "FedProx ltdo ip-o-c seed 1",
    ]
    for job in found:
        (alone,) = jobs(job.pairs, Datasets())
        assert alone.key == job.key
    assert len(jobs(["seed=0"], Datasets())) == 4  # the protocol's default scenarios


def test_jobs_of_several_methods_have_the_settings_that_are_theirs():
    pairs = ["method=fedavg,fedprox", "scenario=ip-o-c", "hyper={mu: 0.5}"]
    fedavg, fedprox = jobs(pairs, Datasets())
    for job, own in ((fedavg, set()), (fedprox, {"hyper={mu: 0.5}"})):
        assert {pair for pair in job.pairs if pair.startswith("hyper")} == own
        (alone,) = jobs(job.pairs, Datasets())
        assert alone.key == job.key


@pytest.mark.parametrize("method", ["grid", "random"])
def test_points_that_differ_in_what_their_method_lacks_are_one(file: Path, method: str) -> None:
    space = {
        "method": {"values": ["FedAvg", "fedprox"]},
        "hyper.mu": {"values": [0.1, 0.5]},
        "scenario": {"value": "ip-o-c"},
    }
    sweep = load_sweep(write(file, parameters=space, method=method, run_cap=40))
    search = open_search(sweep, file.parent)
    assert sorted(job.title for job in search.jobs()) == [
        "FedAvg ltdo ip-o-c seed 0",
        "FedProx ltdo ip-o-c seed 0",
        "FedProx ltdo ip-o-c seed 0",
    ]
    (fedavg,) = (job for job in search.jobs() if job.title.startswith("FedAvg"))
    assert fedavg.key == jobs(["scenario=ip-o-c"], Datasets())[0].key
    space["hyper.nu"] = {"value": 1}
    with refused(SettingsError, "unknown setting 'hyper.nu'"):
        open_search(load_sweep(write(file, parameters=space)), file.parent)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["method=fedpox"], "did you mean 'fedprox'"),
        (["seed=a"], "seeds 'a'"),
        (["scenario=x-y-z"], "x-y-z"),
        (["hyper.mu=-1", "method=fedprox"], "hyper.mu"),
        (["train.lrr=1"], "did you mean 'train.lr'"),
    ],
)
def test_bad_points_are_one_sentence(pairs: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        jobs(pairs, Datasets())


@pytest.mark.parametrize(
    "layer",
    [
        {"parameters": {"a": {"min": 1, "max": 2000}, "b": {"min": 1, "max": 1999}}},
        {"parameters": {"a": {"min": 0, "max": 2**62}}},
        {"method": "random", "run_cap": 10**9, "parameters": {"a": {"values": [1]}}},
    ],
)
def test_a_sweep_without_end_is_refused_at_once(file: Path, layer: dict[str, Any]) -> None:
    with refused(SettingsError, "points"):
        load_sweep(write(file, **layer))


def test_the_first_points_of_a_huge_grid_can_be_had(file: Path) -> None:
    space = {"a": {"min": 0, "max": 2**62}, "b": {"values": [1, 2]}}
    sweep = load_sweep(write(file, run_cap=3, parameters=space))
    assert list(sweep.points()) == [{"a": 0, "b": 1}, {"a": 0, "b": 2}, {"a": 1, "b": 1}]


@pytest.mark.parametrize(
    "spec",
    [
        {"min": -1.7e308, "max": 1.7e308},
        {"min": 1e-300, "max": 1e300, "distribution": "log_uniform_values"},
        {"min": 0.0, "max": 1.0, "q": 1e-300, "distribution": "q_uniform"},
    ],
)
def test_a_range_that_numbers_cannot_span_is_refused(file: Path, spec: dict[str, Any]) -> None:
    with refused(SettingsError, "parameter a"):
        load_sweep(write(file, method="random", run_cap=3, parameters={"a": spec}))
