"""The report's data and page: numbers, escaping, reproducibility, security policy."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import io
import json
import math
import re
import shlex
import statistics
import zlib
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from feddg_bench.analysis.report.gather import gather, in_order
from feddg_bench.analysis.report.page import embedded, figures, render
from feddg_bench.analysis.report.run_details import POINTS
from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.describe import read_filter
from feddg_bench.analysis.tables.generic import leaderboards
from feddg_bench.analysis.tables.grid import DASH
from feddg_bench.analysis.tables.writers import csv_text
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.keys import run_key
from feddg_bench.plugins import method_title, names
from feddg_bench.records.frame import read_frame
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import RULES
from feddg_bench.records.store import ResultsStore
from tests import fabricate_records as fabricate
from tests.helpers import refused

record, save = fabricate.record, fabricate.save
PAIR = ("ip-o-c", "oc-i-p")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028"


def data_of(root: Path, **where: Any) -> dict[str, Any]:
    return gather(read_frame(root), {key: [value] for key, value in where.items()})


def runs_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["key"]: run for run in data["runs"]}


def cells(table: dict[str, Any], metric: str, rule: str | None, split: str) -> dict[str, Any]:
    """Return the cells of a view by row and column name: a scenario or a summary."""
    (view,) = [v for v in table["views"] if (v["metric"], v["rule"]) == (metric, rule)]
    (part,) = [p for p in view["splits"] if p["split"] == split]
    found = {}
    for row, line in zip(table["rows"], part["cells"], strict=True):
        for column, cell in zip(part["columns"], line, strict=True):
            found[plain(row["label"]), column["name"]] = cell
    return found


def plain(label: str) -> str:
    """Return a row's label with the method's name in place of its title."""
    title, more = re.fullmatch(r"([^ ]*)(.*)", label, re.DOTALL).groups()  # type: ignore[union-attr]
    return {method_title(name): name for name in names("method")}.get(title, title) + more


def expected(root: Path, split: str, metric: str, rule: str) -> dict[tuple[str, str], list[float]]:
    """Return each method's numbers by scenario, over seeds, from the files alone."""
    found: dict[tuple[str, str], list[float]] = {}
    records = sorted(ResultsStore(root), key=lambda one: one.seed)
    for one in records:
        evaluations = [entry.evaluation for entry in one.rounds if entry.evaluation]

        def mean(evaluation: dict[str, Any], part: str, name: str) -> float:
            return statistics.fmean(domain[name] for domain in evaluation[part].values())

        looks_at = {"best_by_val": "val", "best_by_id_val": "id_val", "oracle": "test"}
        chosen = evaluations[-5:] if rule == "mean_last_5" else evaluations[-1:]
        if rule in looks_at:
            chosen = [max(evaluations, key=lambda e: mean(e, looks_at[rule], "accuracy"))]
        scale = 100 if metric == "accuracy" else 1
        value = scale * statistics.fmean(mean(one, split, metric) for one in chosen)
        found.setdefault((one.method, one.scenario.name), []).append(value)
    return found


@pytest.fixture
def ltdo(tmp_path: Path) -> Path:
    """Return a folder with two methods, two scenarios, three seeds."""
    for method in ("fedavg", "pardon"):
        for scenario in PAIR:
            save(tmp_path, *(record(method, scenario=scenario, seed=seed) for seed in range(3)))
    return tmp_path


# ------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("split", ["test", "val", "id_test", "id_val"])
@pytest.mark.parametrize(("metric", "digits"), [("accuracy", 2), ("loss", 3)])
def test_cells_are_means_over_seeds_of_the_records(
    ltdo: Path, rule: str, split: str, metric: str, digits: int
) -> None:
    (table,) = data_of(ltdo)["tables"]
    shown = cells(table, metric, rule, split)
    wanted = expected(ltdo, split, metric, rule)
    assert len(wanted) == 4
    for (method, scenario), values in wanted.items():
        mean, std = statistics.fmean(values), statistics.stdev(values)
        assert shown[method, scenario]["text"] == f"{mean:.{digits}f} ± {std:.{digits}f}"
    for method in ("fedavg", "pardon"):
        seeds = list(zip(*(wanted[method, scenario] for scenario in PAIR), strict=True))
        values = [statistics.fmean(pair) for pair in seeds]
        said = f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
        if (method, "iqm") in shown:  # it replaces the mean if runs collapse
            continue
        if split != "test" or (method, "test") not in shown:
            assert shown[method, "mean"]["text"] == said
            continue
        assert shown[method, "test"]["text"] == said  # `mean` is over both unseen domains
        beside = expected(ltdo, "val", metric, rule)
        pairs = zip(*(of[method, s] for of in (wanted, beside) for s in PAIR), strict=True)
        values = [statistics.fmean(pair) for pair in pairs]
        said = f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
        assert shown[method, "mean"]["text"] == said
    both = metric == "accuracy" and split == "test" and rule not in ("best_by_val", "oracle")
    assert both == (("fedavg", "test") in shown)


def test_the_same_numbers_and_marks_as_the_tables(tmp_path: Path) -> None:
    fabricate.population(tmp_path, 80, rounds=5)
    save(tmp_path, in_the_papers_frame())
    data = data_of(tmp_path)
    titles = [table["name"] for table in data["tables"]]
    assert sorted(titles[:2]) == ["pacs-ltdo-pardon", "pacs-ltdo-quick"]  # real images first
    assert sorted(titles[2:]) == ["digits4-lodo-quick", "digits4-ltdo-quick"]
    compared = beside = 0
    for generic, table in zip(
        in_order(leaderboards(read_frame(tmp_path))), data["tables"], strict=True
    ):
        grid = build(generic.name, generic.description, generic.runs, any_paper=True)
        assert table["title"] == grid.title
        assert table["views"][0]["caption"] == grid.caption
        detail = {column.head for column in grid.columns if column.detail}
        for row in csv.DictReader(io.StringIO(csv_text(grid))):
            if row["group"] == "val" or row["column"] in {"val", *detail}:
                continue
            shown = cells(table, "accuracy", "last", "test")
            name = row["scenario"] if row["kind"] == "measured" else row["kind"]
            name = "test" if row["column"] == "test" else name
            place = (plain(row["row"]), name)
            if place not in shown:  # a p-value of too few scenarios, the mean of a single one
                assert name in ("p_value", "test")
                continue
            found = shown[place]
            assert found["text"] == row["text"].removeprefix("'")
            assert found.get("mark", "") == row["mark"]
            if row["published"]:
                published, gap = float(found["published"]), float(found["gap"])
                assert published == pytest.approx(float(row["published"]), abs=0.0051)
                assert gap == pytest.approx(float(row["difference"]), abs=0.0101)
            beside += bool(row["published"])
            compared += 1
    assert compared > 40
    assert beside > 0


def test_tables_go_from_real_to_synthetic_images_and_from_well_to_less_trained_recipes(
    tmp_path: Path,
) -> None:
    def trained(accuracy: float, dataset: str, scenario: str, recipe: str, seeds: int) -> None:
        protocol = "lodo" if scenario == "ipo-c" else "ltdo"
        for seed in range(seeds):
            more = {"recipe": recipe, "entries": evaluated(accuracy=accuracy)}
            save(tmp_path, record("fedavg", dataset, protocol, scenario, seed, **more))

    trained(0.99, "digits4", "ip-o-c", "quick", 2)
    trained(0.6, "pacs", "cs-a-p", "quick", 3)
    trained(0.8, "pacs", "cs-a-p", "laptop", 1)
    trained(0.99, "digits4", "ipo-c", "quick", 1)
    data = data_of(tmp_path)
    assert [table["name"] for table in data["tables"]] == [
        "pacs-ltdo-laptop",
        "pacs-ltdo-quick",
        "digits4-ltdo-quick",
        "digits4-lodo-quick",
    ]
    assert "real images before synthetic" in data["order"]
    heads = [column["name"] for column in data["tables"][0]["views"][0]["splits"][0]["columns"]]
    assert heads[:2] == ["mean", "id_test"]  # over both unseen domains of the single scenario
    assert "test" not in heads


FOUR = ("ip-o-c", "oc-i-p", "ic-p-o", "po-c-i")


def test_a_test_and_an_interval_stand_beside_the_difference(tmp_path: Path) -> None:
    for (number, name), seed in product(enumerate(FOUR), range(3)):
        for method, gain in (("fedavg", 0.0), ("pardon", 0.02 * number)):
            entries = evaluated(accuracy=0.5 + 0.01 * seed + gain)
            save(tmp_path, record(method, scenario=name, seed=seed, entries=entries))
    (table,) = data_of(tmp_path)["tables"]
    part = table["views"][0]["splits"][0]
    assert part["columns"][0]["name"] == "mean"
    heads = {column["name"]: (column["head"], column["below"]) for column in part["columns"]}
    assert [heads[name][0] for name in ("mean", "test")] == ["mean, val and test", "test"]
    assert heads["difference"] == ("difference, val and test", "to FedAvg")
    assert heads["p_value"] == ("p, val and test", "Holm")
    (chosen,) = (
        v for v in table["views"] if (v["metric"], v["rule"]) == ("accuracy", "best_by_val")
    )
    assert "difference" in {column["head"] for column in chosen["splits"][0]["columns"]}
    found = cells(table, "accuracy", "last", "test")
    assert found["fedavg", "difference"]["text"] == "reference"
    number = r"[+-]\d+\.\d\d"
    said = found["pardon", "difference"]["text"]
    assert re.fullmatch(rf"{number} \[{number}, {number}\]", said)
    assert 0 < float(found["pardon", "p_value"]["text"]) <= 1


def evaluated(**numbers: float) -> dict[int, Any]:
    """Return entries of four rounds with the same numbers on three splits."""
    domain = {"all": {"loss": 1.0, "images": 9, **numbers}}
    return {
        n: {"evaluation": dict.fromkeys(("test", "val", "id_test"), domain)} for n in range(1, 5)
    }


def test_a_mark_needs_a_test(tmp_path: Path) -> None:
    for (number, scenario), seed in product(enumerate(FOUR), range(3)):
        step = 0.01 * number
        for method, value in (("fedavg", 0.5 + step), ("moon", 0.9 + step), ("pardon", 0.931)):
            entries = evaluated(accuracy=value)
            save(tmp_path, record(method, scenario=scenario, seed=seed, entries=entries))
    found = cells(data_of(tmp_path)["tables"][0], "accuracy", "last", "test")
    marks = {key: cell["mark"] for key, cell in found.items() if "mark" in cell}
    assert marks == {}  # each column's best number is within noise of another
    for seed in range(3):
        found = cells(data_of(tmp_path)["tables"][0], "accuracy", "last", "test")
        assert not any("mark" in cell for cell in found.values())
        for number, scenario in enumerate(FOUR):
            entries = evaluated(accuracy=0.95 + 0.01 * number)
            save(tmp_path, record("fedsr", scenario=scenario, seed=seed, entries=entries))
    found = cells(data_of(tmp_path)["tables"][0], "accuracy", "last", "test")
    marks = {key: cell["mark"] for key, cell in found.items() if "mark" in cell}
    assert marks == {("fedsr", name): "best" for name in ("mean", "test")}


def test_between_equal_rows_no_difference_is_printed(tmp_path: Path) -> None:
    for method in ("fedavg", "fedbn"):
        entries = evaluated(accuracy=0.5)
        save(tmp_path, *(record(method, scenario=name, entries=entries) for name in FOUR))
    (table,) = data_of(tmp_path)["tables"]
    assert cells(table, "accuracy", "last", "test")["fedbn", "difference"]["text"] == DASH
    why = "identical to FedAvg: the network has no batch normalisation"
    assert why in table["views"][0]["footnotes"]


def test_macro_f1_stands_next_to_accuracy_where_classes_are_imbalanced(tmp_path: Path) -> None:
    entries = evaluated(accuracy=0.9, macro_f1=0.25)
    for scenario in ("ip-o-c", "oc-i-p"):
        made = record(scenario=scenario, entries=entries)
        data = made.data.model_copy(update={"imbalance": 3.0})
        save(tmp_path, made.model_copy(update={"data": data}))
    (table,) = data_of(tmp_path)["tables"]
    for split in ("test", "val", "id_test"):
        found = cells(table, "accuracy", "last", split)
        assert found["fedavg", "mean"]["text"] == "90.00"
        assert found["fedavg", "macro_f1"]["text"] == "25.00"


def test_settings_that_vary_are_rows_of_their_own_table(ltdo: Path) -> None:
    save(ltdo, record("pardon", scenario="ip-o-c", settings={"train": {"lr": 0.5}}))
    data = data_of(ltdo)
    (table,), (varied,) = data["tables"], data["varied"]
    assert [plain(row["label"]) for row in table["rows"]] == ["pardon", "fedavg"]
    assert varied["setup"] == table["setup"]
    (row,) = varied["rows"]
    assert row["label"] == "PARDON (lr=0.5)"
    assert [data["runs"][place]["scenario"]["name"] for place in row["runs"]] == ["ip-o-c"]


def test_costs(ltdo: Path) -> None:
    (table,) = data_of(ltdo)["tables"]
    found = cells(table, "cost", None, "cost")
    zero = " ± 0.000"
    assert found["fedavg", "MB up a round"]["text"] == "2.000" + zero
    assert found["fedavg", "MB down a round"]["text"] == "1.000" + zero
    assert found["fedavg", "s training a client"]["text"] == "1.500" + zero
    assert found["fedavg", "s aggregation a round"]["text"] == "0.250" + zero
    assert found["fedavg", "s before round 1"]["text"] == "2.000" + zero


def in_the_papers_frame() -> RunRecord:
    frame = fabricate.in_frame("pardon", "pacs", "pardon")
    return record("pardon", "pacs", scenario="cs-a-p", recipe="pardon", settings=frame)


def test_published_numbers_stand_beside_ours(tmp_path: Path) -> None:
    save(tmp_path, in_the_papers_frame())
    (table,) = data_of(tmp_path)["tables"]
    cell = cells(table, "accuracy", "last", "test")["pardon", "cs-a-p"]
    assert cell["published"] == "93.05"  # PARDON's paper, table 1
    assert cell["source"] == "pardon, table 1"
    assert cell["gap"] == f"{float(cell['text']) - 93.05:+.2f}"
    for metric, split in (("loss", "test"), ("accuracy", "id_test")):
        assert "published" not in cells(table, metric, "last", split)["pardon", "cs-a-p"]


def test_a_missing_cell_has_the_command_that_fills_it(tmp_path: Path) -> None:
    save(tmp_path, record(), record(scenario="oc-i-p"), record("pardon"))
    data = data_of(tmp_path)
    (table,) = data["tables"]
    assert cells(table, "accuracy", "last", "test")["pardon", "oc-i-p"]["text"] == DASH
    said = {(row, text) for row, _, text in table["fills"]}
    assert len({text for row, text in said if row == 1}) == 1
    assert all("--method pardon" in text and "--scenario oc-i-p" in text for row, text in said)


def test_a_rule_that_cannot_choose_shows_nothing(tmp_path: Path) -> None:
    save(tmp_path, record(protocol="lodo", scenario="ipo-c"))
    data = data_of(tmp_path)
    (table,) = data["tables"]
    splits = {(v["metric"], v["rule"]): [p["split"] for p in v["splits"]] for v in table["views"]}
    assert splits["accuracy", "best_by_val"] == []
    assert splits["accuracy", "last"] == ["test", "id_test", "id_val"]
    (run,) = runs_of(data).values()
    assert run["chosen"]["best_by_val"] == []


@pytest.mark.parametrize(
    ("key_metric", "task", "scale"),
    [("macro_f1", "classification", 100), ("pearson", "regression", 1)],
)
def test_the_data_sets_own_metric_is_shown_and_chosen_by(
    tmp_path: Path, key_metric: str, task: str, scale: int
) -> None:
    values = {1: (0.25, 0.5), 2: (0.75, 0.125), 3: (0.5, 0.25)}  # of val, of test

    def entry(number: int) -> dict[str, Any]:
        own = {"val": values[number][0], "test": values[number][1]}
        return {
            "evaluation": {
                split: {
                    "all": {
                        key_metric: value,
                        "accuracy": 0.1 * number,
                        "worst_group": value / 2,
                        "loss": 0.5,
                        "images": 10,
                    }
                }
                for split, value in own.items()
            }
        }

    made = record(rounds=3, entries={number: entry(number) for number in values})
    save(
        tmp_path,
        made.model_copy(
            update={"data": made.data.model_copy(update={"metric": key_metric, "task": task})}
        ),
    )
    data = data_of(tmp_path)
    (table,) = data["tables"]
    assert table["metric"] == key_metric
    digits = 2 if scale == 100 else 3
    for rule, number in (("last", 3), ("best_by_val", 2), ("oracle", 1)):
        for metric, factor in ((key_metric, 1.0), ("worst_group", 0.5)):
            cell = cells(table, metric, rule, "test")["fedavg", "ip-o-c"]
            assert cell["text"] == f"{scale * factor * values[number][1]:.{digits}f}"
    (run,) = runs_of(data).values()
    curves = run["curves"]["test"]
    assert curves[key_metric] == [scale * v for _, v in values.values()]
    assert ("accuracy" not in curves) == (task == "regression")
    assert data["measured"] == [
        metric
        for metric in ("accuracy", "macro_f1", "pearson", "worst_group", "loss", "cost")
        if metric in (key_metric, "worst_group", "loss", "cost")
        or (metric == "accuracy" and task == "classification")
    ]


# --------------------------------------------------------------------------------- runs


def test_what_is_said_of_a_run(tmp_path: Path) -> None:
    nan_loss = {"test": {"chalk": {"accuracy": 0.5, "loss": math.nan, "images": 10}}}
    drop = {"client": "client_001", "tensor": "head.weight"}
    entries = {
        2: {"dropped": [drop], "bytes": {"up": 1_000_000, "down": 1_000_000}},
        3: {"skipped": True, "seconds": {"training": 1.0, "evaluation": 4.0}},
        4: {"evaluation": nan_loss},
    }
    one = record(entries=entries)
    save(tmp_path, one)
    data = data_of(tmp_path)
    (run,) = runs_of(data).values()
    assert (run["key"], run["seed"], run["rounds"], run["clients"]) == (one.key, 0, 4, 20)
    assert (run["skipped"], run["dropped"]) == (1, 1)
    assert run["drops"] == [[2, "client_001", "head.weight"]]
    assert run["bytes"] == [1_750_000, 1_000_000, 5000, 0]
    assert run["phases"] == [
        ["aggregation", 0.1875, 0.5],
        ["communication", 0.0075, 0.0],
        ["evaluation", 1.0, 0.0],
        ["training", 2.5, 1.5],
    ]
    assert (run["seconds"], run["memory"]) == (60.5, 1000.2)
    assert run["evaluated"] == [1, 2, 3, 4]
    accuracy, loss = (run["curves"]["test"][name] for name in ("accuracy", "loss"))
    assert accuracy[3] == 50.0
    assert loss[3] is None
    first = one.rounds[0].evaluation["test"]["chalk"]
    assert accuracy[0] == round(100 * first["accuracy"], 2)
    assert loss[0] == round(first["loss"], 4)
    environment = run["environment"]
    assert environment["versions"] == "python 3.11.7, torch 2.15.0"
    assert environment["commit"] == "0123456789ab"
    assert run["scenario"]["test"] == "chalk"
    assert unpacked(embedded(data)) == json.loads(json.dumps(data))


def test_long_curves_are_thinned_but_chosen_rounds_stay(tmp_path: Path) -> None:
    one = record(rounds=400)
    save(tmp_path, one)
    data = data_of(tmp_path)
    (run,) = runs_of(data).values()
    rounds = run["evaluated"]
    assert POINTS <= len(rounds) <= POINTS + len(RULES) + 4
    assert (rounds[0], rounds[-1]) == (1, 400)
    values = [entry.evaluation["test"]["chalk"]["accuracy"] for entry in one.rounds]
    (oracle,) = run["chosen"]["oracle"]
    assert rounds[oracle] == values.index(max(values)) + 1
    assert rounds[run["chosen"]["last"][0]] == 400


def test_runs_of_one_setup_share_its_settings(ltdo: Path) -> None:
    data = data_of(ltdo)
    assert len(data["runs"]) == 12
    assert len(data["setups"]) == 2
    setup = data["setups"][0]
    settings = dict(setup["settings"])
    assert (
        settings["train.lr"]
        == f"{ResultsStore(ltdo).__iter__().__next__().settings['train']['lr']:g}"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train": {"lr": 1e-5, "eps": 1e-8, "optimizer": "sgd"}, "federation": {"per_round": None}},
        {"augment": {"crop_scale": [0.5, 0.9], "flip": 0.0}, "backbone": {"projection": 16}},
    ],
)
@pytest.mark.parametrize(
    ("method", "recipe", "hyper"),
    [("fedavg", "quick", {}), ("fedprox", "mine", {"mu": 1e-5, "norm": "l2"})],
)
def test_the_command_repeats_the_run(
    tmp_path: Path, settings: dict[str, Any], method: str, recipe: str, hyper: dict[str, Any]
) -> None:
    from feddg_bench import cli
    from feddg_bench.plugins import load_method
    from feddg_bench.runs.request import NAMES, Request

    resolved = load_method(method).Settings(**hyper).model_dump(mode="json")
    save(tmp_path, record(method, recipe=recipe, seed=3, settings={**settings, "hyper": resolved}))
    data = data_of(tmp_path)
    (run,) = runs_of(data).values()
    flag = run["scenario"]["flag"]
    line = f"{data['setups'][0]['command']} --scenario {flag} --seeds {run['seed']}"
    command = typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]
    assert shlex.split(line)[:2] == ["feddg-bench", "run"]
    given = command.make_context("run", shlex.split(line)[2:]).params
    flags = {name: given[name] for name in NAMES if name in given}
    (plan,) = Request.read(flags=flags, pairs=given["pairs"] or ()).plan(check=False)
    assert plan.key == run["key"]


def test_the_command_leaves_out_what_planning_derives(tmp_path: Path) -> None:
    one = record(recipe="quick", settings={"train": {"precision": "bf16-mixed"}})
    settings = copy.deepcopy(one.settings)
    settings["train"]["float32"] = ["strided depthwise inputs"]
    key = run_key(settings, one.method_version)
    save(tmp_path, one.model_copy(update={"settings": settings, "key": key}))
    (setup,) = data_of(tmp_path)["setups"]
    assert "train.precision=bf16-mixed" in setup["command"]
    assert "float32=" not in setup["command"]


# --------------------------------------------------------------------------- the folder


def test_filter(ltdo: Path) -> None:
    assert len(data_of(ltdo, method="pardon")["runs"]) == 6
    where = read_filter(["method=fedavg,pardon", "seed=1", "train.batch_size=32"])
    assert len(gather(read_frame(ltdo), where)["runs"]) == 4
    with refused(DataError, "none of the 12 runs has method moon (there are fedavg"):
        data_of(ltdo, method="moon")


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("method", "expected KEY=VALUE"),
        ("=x", "expected KEY=VALUE"),
        ("metod=x", "--filter: unknown setting 'metod'.*'method'"),
        ("method=[", "the value of --filter"),
        ("seed=2020-13-45", "the value of --filter"),
    ],
)
def test_a_filter_that_cannot_be_read(pair: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read_filter([pair])


def test_no_records(tmp_path: Path) -> None:
    with refused(DataError, "there is no record to report"):
        data_of(tmp_path)


# --------------------------------------------------------------------------------- page


class Page(HTMLParser):
    """The page as a browser parses it: elements with attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.last = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.last = tag
        if tag in ("script", "style"):
            self.inside.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self.last = ""

    def handle_data(self, data: str) -> None:
        if self.last in ("script", "style"):
            self.inside[self.last][-1] += data


def hostile(root: Path) -> Path:
    domains = ((HOSTILE, "ink"), "__proto__", "poster")
    one = record(
        HOSTILE, HOSTILE, HOSTILE, HOSTILE,
        domains=domains,
        recipe=HOSTILE,
        settings={"hyper": {HOSTILE: HOSTILE, "__proto__": "polluted"}},
        environment={"versions": {HOSTILE: HOSTILE}, "commit": HOSTILE, "__proto__": HOSTILE},
    )  # fmt: skip
    save(root, one)
    (root / "figures").mkdir()
    (root / "figures" / 'a"><script>alert(3)<!--.png').write_bytes(b"png")
    return root


def test_hostile_records_stay_text(tmp_path: Path) -> None:
    root = hostile(tmp_path)
    data = data_of(root)
    page = Page(render(data, figures(root / "figures")))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert tags.count("img") == 1
    assert unpacked(page.inside["script"][0]) == json.loads(json.dumps(data))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner)))
def test_embedded_json_holds_no_markup_and_comes_back(value: Any) -> None:
    text = embedded({"a": value})
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", text)
    assert unpacked(text) == {"a": value}


def test_nothing_is_asked_for_from_outside(ltdo: Path) -> None:
    (ltdo / "figures").mkdir()
    (ltdo / "figures" / "one.png").write_bytes(b"png")
    text = render(data_of(ltdo), figures(ltdo / "figures"))
    page = Page(text)
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    hashes = [
        base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        for inside in (page.inside["style"][0], page.inside["script"][1])
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"url\(|@import", page.inside["style"][0])
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp"
    assert not re.search(forbidden, page.inside["script"][1])


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    records = [record(m, seed=seed) for m in ("fedavg", "moon", "pardon") for seed in range(2)]
    pages = []
    for name, order in (("one", records), ("two", records[::-1])):
        save(tmp_path / name, *order)
        pages.append(render(data_of(tmp_path / name)))
    assert pages[0] == pages[1]
    assert str(tmp_path) not in pages[0]


def test_a_large_folder_stays_small(tmp_path: Path) -> None:
    fabricate.population(tmp_path, 120, rounds=10)
    page = len(render(data_of(tmp_path)))
    assert page < 60_000 + 120 * 2000, "528 runs would not stay below 1.2 MB"


def test_all_figures_are_shown_and_described(tmp_path: Path) -> None:
    for name, size in (("b.png", 50), ("b.svg", 20), ("a.jpg", 30), ("c.png", 2_000_000)):
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "d.txt").write_bytes(b"")
    info = PngInfo()
    info.add_itxt("Description", "who holds <what>")
    Image.new("L", (1, 1)).save(tmp_path / "e.png", pnginfo=info)
    shown = figures(tmp_path)
    assert [figure.name for figure in shown] == ["a", "b", "c", "e"]
    assert [figure.text for figure in shown] == ["a", "b", "c", "who holds <what>"]
    assert shown[1].uri.startswith("data:image/svg+xml;base64,")
    assert base64.b64decode(shown[0].uri.partition(",")[2]) == b"x" * 30
    assert figures(tmp_path / "missing") == []


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
