"""Mutated settings: each is refused in one sentence, or means what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tests.attacks.lab import TINY, Lab, Outcome
from tests.attacks.pictures import few

MANY = 1_000_000


class Kind(NamedTuple):
    """What a setting takes, written down here once more, by hand.

    Attributes:
        good: Values that are right.
        bad: Values that are wrong for this setting, beside `NEVER`.
    """

    good: tuple[str, ...]
    bad: tuple[str, ...]


def whole(low: int, high: int) -> Kind:
    """Return the kind of a whole number."""
    bad = (str(low - 1), str(high + 1), f"{low}.5", "true", "1.5", "2020-01-01", "''", "null")
    return Kind((str(low), f"{high}", f"{low}.0"), bad)


def real(good: tuple[str, ...], bad: tuple[str, ...]) -> Kind:
    """Return the kind of a finite number."""
    return Kind(good, (*bad, ".nan", ".inf", "-.inf", "1e400", "true", "nan", "inf", "''", "null"))


def share(low: str, high: str, *, closed: str = "[]") -> Kind:
    """Return the kind of a number in an interval."""
    ends = [(low, closed[0] == "["), (high, closed[1] == "]")]
    good = tuple(value for value, inside in ends if inside)
    beyond = tuple(value for value, inside in ends if not inside)
    return real(good, (*beyond, f"-{float(low) + 1e-9}", str(float(high) + 1e-9), "1e300"))


def one_of(*good: str) -> Kind:
    """Return the kind of a word."""
    return Kind(good, (good[0][:-1], good[0].upper(), "0", "true", "''", "null", f"[{good[0]}]"))


TRUTH = Kind(("true", "false"), ("2", "-1", "0.5", "maybe", "''", "null", "[true]"))
NEVER = ("[1, 2", "{a: 1}", "'9': [", "9" * 5000, "[" * 5000, "&a [*a]", "!!python/name:os.system")
"""Values that no setting takes; a whole number of 5,000 digits has no end for some readers."""

KEYS: dict[str, Kind] = {
    "data.image_size": whole(8, 1024),
    "data.id_val_fraction": share("0", "1", closed="[)"),
    "data.id_test_fraction": share("0", "1", closed="[)"),
    "augment.crop_scale": Kind(
        ("[0.5, 1.0]", "null", "[1, 1]"),
        (
            "[1.0, 0.5]",
            "[0, 1]",
            "[0.5, 1.5]",
            "[0.5]",
            "[a, b]",
            "[true, true]",
            "0.5",
            "[.nan, 1]",
        ),
    ),
    "augment.flip": share("0", "1"),
    "augment.hue": share("0", "0.5"),
    "augment.brightness": real(("0", "0.5"), ("-0.1",)),
    "partition.kind": one_of("heterogeneous", "pooled", "domain", "per_domain", "dirichlet"),
    "partition.clients": whole(1, MANY),
    "partition.heterogeneity": share("0", "1"),
    "partition.rounding": one_of("largest_remainder", "reference"),
    "partition.clients_per_domain": whole(1, MANY),
    "partition.alpha": real(("0.1", "100"), ("0", "-1")),
    "partition.min_client_size": whole(0, MANY),
    "backbone.name": one_of("small_cnn", "lenet"),
    "backbone.pretrained": TRUTH,
    "backbone.padding": one_of("torch", "tf"),
    "backbone.normalisation": one_of("auto", "imagenet", "half", "none"),
    "backbone.projection": whole(0, 65_536),
    "train.optimizer": one_of("adam", "sgd"),
    "train.lr": real(("1e-3", "0.5"), ("0", "-1")),
    "train.momentum": share("0", "1", closed="[)"),
    "train.weight_decay": real(("0", "0.1"), ("-0.1",)),
    "train.eps": real(("1e-8",), ("0", "-1e-8")),
    "train.schedule": one_of("constant", "cosine", "exponential"),
    "train.decay": share("0", "1", closed="(]"),
    "train.optimizer_state": one_of("reset", "persist"),
    "train.local_epochs": whole(1, MANY),
    "train.batch_size": whole(1, MANY),
    "train.drop_last_if_single": TRUTH,
    "train.precision": one_of("32-true", "bf16-mixed"),
    "train.channels_last": TRUTH,
    "federation.rounds": whole(1, MANY),
    "federation.per_round": Kind(
        ("1", "null"), ("0", "-1", "1.5", "true", "many", str(MANY + 1), "[1]", ".nan")
    ),
    "federation.bn": one_of("average", "frozen", "local"),
    "federation.weighting": one_of("samples", "uniform"),
    "federation.server_lr": real(("1", "0.5"), ("0", "-1")),
    "evaluation.every": whole(1, MANY),
    "evaluation.start": whole(1, MANY),
    "evaluation.batch_size": whole(1, MANY),
    "gpu.tf32": TRUTH,
    "gpu.autotune": TRUTH,
    "gpu.deterministic": TRUTH,
}
DEPENDS = {
    "partition.clients": {str(MANY)},  # not so many images
    "partition.clients_per_domain": {str(MANY)},
    "partition.min_client_size": {str(MANY)},
    "backbone.pretrained": {"true"},  # no weights there
    "backbone.padding": {"tf"},
    "partition.kind": {"dirichlet"},  # may leave a client without an image
    "data.id_val_fraction": {"0"},
    "backbone.name": {"lenet"},
}
"""Right values that other facts may still refuse, in a sentence."""
FLAGS = {
    "--rounds": ("0", "-1", "x", "1.5", str(MANY + 1), "9" * 5000, ""),
    "--clients": ("0", "-1", "x", str(MANY + 1), str(10**30)),
    "--per-round": ("0", "-1", "x", str(10**30)),
    "--heterogeneity": ("-0.1", "1.1", "nan", "inf", "x", "1e400"),
    "--workers": ("-1", "x", "100000", str(10**30)),
    "--threads": ("0", "-1", "x", "100000"),
    "--checkpoint-every": ("0", "-1", "x", str(10**30)),
    "--seeds": ("", "x", "-1", "1.5", "0-", "3-1", "0-99999999999", str(2**63), "0,,1", "9" * 5000),
    "--method": ("", "fedagv", "../fedavg", "all,", "fedavg.Settings", "\x00"),
    "--dataset": ("", "digits", "../digits4", "all", "\x1b[31m"),
    "--protocol": ("", "ltd", "all"),
    "--scenario": ("", "x", "ip-o", "../x", "ip-o-c,x"),
    "--recipe": ("", "fast", "/absent.yaml", "/", "/dev/zero", "../../quick"),
    "--wandb": ("", "yes", "on"),
    "--config": ("/absent.yaml", "/", "/dev/zero", "\x00"),
    "--keep": ("first", "last;best"),
}


def plan(lab: Lab, *arguments: object) -> Outcome:
    """Ask which runs there would be."""
    return lab.feddg("run", "--dry-run", "--scenario", "ip-o-c", "--per-round", 1, *arguments)


def layer(key: str, value: Any) -> dict[str, Any]:
    """Return a nested layer."""
    section, name = key.split(".")
    return {section: {name: value}}


def cases() -> Iterator[tuple[str, str, bool]]:
    """Yield keys, values and whether they are right."""
    for number, (key, kind) in enumerate(KEYS.items()):
        yield from ((key, value, True) for value in kind.good)
        yield from ((key, value, False) for value in kind.bad)
        yield from ((key, NEVER[(number + i) % len(NEVER)], False) for i in range(3))


def judge(lab: Lab, attack: str, outcome: Outcome, right: bool, *, maybe: bool = False) -> None:
    """Enter a setting that is right or wrong."""
    if right and not (maybe and outcome.refused):
        lab.add(attack, f"exit {outcome.code}: {outcome.sentence}", outcome.code == 0)
    else:
        lab.refused(attack, outcome)


def pairs(lab: Lab) -> None:
    """Give every key right and wrong values as ``KEY=VALUE``."""
    for key, value, right in cases():
        own = () if key != "federation.per_round" else ("--set", f"{key}={value}")
        outcome = plan(lab, *(own or (f"{key}={value}",)))
        maybe = value in DEPENDS.get(key, ())
        judge(lab, f"{key}={value:.40}", outcome, right, maybe=maybe)
    for key in KEYS:
        wrong = key[:-2] + key[-1]
        outcome = plan(lab, f"{wrong}=1")
        hinted = outcome.refused and f"'{key}'" in outcome.err
        lab.add(f"misspelt {wrong}", outcome.sentence, hinted)


def flags(lab: Lab) -> None:
    """Give flags wrong values."""
    for flag, values in FLAGS.items():
        for value in values:
            outcome = lab.feddg("run", "--dry-run", "--scenario", "ip-o-c", flag, value)
            lab.refused(f"{flag} {value[:40]!r}", outcome)
    devices = ("", "gpu", "cuda:99", "cuda:0,", "cuda:" + "9" * 5000, "cpu:x", "meta")
    for value in devices:  # nothing is computed in a dry run
        outcome = lab.feddg("run", *TINY, "--device", value, "--results", lab.folder())
        lab.refused(f"--device {value!r}", outcome)


def files(lab: Lab) -> None:
    """Put wrong values, and YAML that is none, into ``--config`` files."""
    folder = lab.folder()
    wrong = [(k, v) for k, v, right in cases() if not right and "per_round" not in k][::7]
    texts = {f"{k}: {v:.30}": f"{k.split('.')[0]}: {{{k.split('.')[1]}: {v}}}" for k, v in wrong}
    texts |= {
        "a section twice": "train: {lr: 0.1}\ntrain: {lr: 0.2}",
        "a key twice": "train:\n  lr: 0.1\n  lr: 0.2",
        "5,000 levels": "train: " + "{lr: " * 5000,
        "a million brackets": "[" * 999_000,
        "a list": "- train",
        "a text": "train",
        "bytes": "\x00\x01",
        "two documents": "train: {lr: 0.1}\n---\ntrain: {lr: 0.2}",
        "a bomb of aliases": "a: &a [x]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n"
            for i in range(9)
        ),
        "a circle": "train: &t {lr: *t}",
        "an object": "train: !!python/object/apply:os.system ['true']",
        "a key of another kind": "1: 2",
        "an unknown section": "trian: {lr: 0.1}",
        "a section that is a number": "train: 5",
        "a section that is null": "train: null",
        "hyper that is a list": "hyper: [1]",
        "a huge number": "train: {batch_size: " + "9" * 5000 + "}",
    }
    path = folder / "c.yaml"
    for name, text in texts.items():
        path.write_text(text)
        lab.refused(f"--config: {name}", plan(lab, "--config", path))
    path.write_bytes(b"\xff\xfe\x00")
    lab.refused("--config: not UTF-8", plan(lab, "--config", path))


def recipes(lab: Lab) -> None:
    """Give recipes that are none."""
    path = lab.folder() / "mine.yaml"
    right = {"settings": {}, "datasets": {"digits4": {}}, "methods": {}}
    for change in (
        {"settings": 5},
        {"settings": [1]},
        {"settings": {"train": 5}},
        {"settings": {"train": {"lr": -1}}},
        {"settings": {"trian": {}}},
        {"settings": {"method": "fedprox"}},
        {"settings": {"seed": 3}},
        {"datasets": 5},
        {"datasets": ["digits4"]},
        {"datasets": {}},
        {"datasets": {"pacs": {}}},
        {"datasets": {"digits4": 5}},
        {"datasets": {"digits4": {"methods": 5}}},
        {"datasets": {"digits4": {"methods": {"fedavg": 5}}}},
        {"datasets": {"digits4": {"dataset": "pacs"}}},
        {"methods": 5},
        {"methods": {"fedavg": 5}},
        {"methods": {"fedavg": {"hyper": 5}}},
        {"methods": {"fedavg": {"hyper": {"mu": 5}}}},
        {"evil": 5},
    ):
        path.write_text(yaml.safe_dump({**right, **change}))
        lab.refused(f"recipe: {change}", plan(lab, "--recipe", path))
    path.write_text("settings: {}\nsettings: {}\ndatasets: {digits4: {}}")
    lab.refused("recipe: a key twice", plan(lab, "--recipe", path))


def names(lab: Lab) -> None:
    """Say in a ``--config`` file which run it is: it means that, or is refused."""
    folder = lab.folder()
    path = folder / "c.yaml"
    flags_of = {"method": "--method", "protocol": "--protocol", "seed": "--seeds"}
    for name, value in (("method", "fedprox"), ("protocol", "lodo"), ("seed", 7)):
        path.write_text(yaml.safe_dump({name: value}))
        flag = (flags_of[name], value)
        said = lab.feddg("run", "--dry-run", "--config", path)
        flagged = lab.feddg("run", "--dry-run", *flag)
        same = said.code == 0 and said.out == flagged.out
        lab.add(f"--config: {name}: {value}", said.sentence, same or said.refused)
    for text in (
        "dataset: nonsense",
        "seed: abc",
        "seed: true",
        "scenario: x",
        "protocol: 5",
        "dataset: null",
        "method: null",
    ):
        path.write_text(text)
        lab.refused(f"--config: {text}", lab.feddg("run", "--dry-run", "--config", path))
    out = lab.folder()
    path.write_text("dataset: pacs")
    lab.feddg("run", *TINY, "--rounds", 1, "--config", path, "--results", out)
    forged = [p for p in out.rglob("*.json") if "pacs" in p.read_text()]
    lab.add("--config: dataset: pacs, trained", f"{len(forged)} records of PACS", not forged)


def sweeps(lab: Lab) -> None:
    """Give sweep files wrong values."""
    folder = lab.folder()
    path = folder / "s.yaml"
    head = 'program: feddg-bench\ncommand: [feddg-bench, run, "${args_no_hyphens}"]\n'
    texts = {
        "a key twice": "method: grid\nmethod: random\nparameters: {seed: {value: 1}}",
        "a parameter twice": "method: grid\nparameters: {seed: {value: 1}, seed: {value: 2}}",
        "5,000 levels": "method: grid\nparameters: " + "{a: " * 5000,
        "2,000 x 1,999 points": "method: grid\nparameters: {seed: {min: 1, max: 2000}, "
        "federation.rounds: {min: 1, max: 1999}}",
        "2**62 points": f"method: grid\nparameters: {{seed: {{min: 0, max: {2**62}}}}}",
        "a billion points": "method: random\nrun_cap: 1000000000\nparameters: {seed: {value: 1}}",
        "a huge number": "method: grid\nparameters: {seed: {value: " + "9" * 5000 + "}}",
        "a range without bounds": "method: random\nrun_cap: 2\nparameters: "
        "{train.lr: {min: -1.7e308, max: 1.7e308}}",
        "steps without end": "method: random\nrun_cap: 2\nparameters: "
        "{train.lr: {min: 0.1, max: 1.0, q: 1.0e-300, distribution: q_uniform}}",
        "max below min": "method: random\nrun_cap: 2\nparameters: {train.lr: {min: 2, max: 1}}",
        "no parameters": "method: grid\nparameters: {}",
        "a list of parameters": "method: grid\nparameters: [seed]",
        "an unknown method": "method: gird\nparameters: {seed: {value: 1}}",
        "a run_cap of true": "method: grid\nrun_cap: true\nparameters: {seed: {value: 1}}",
        "probabilities that miss": "method: random\nrun_cap: 2\nparameters: "
        "{seed: {values: [1, 2], probabilities: [1]}}",
        "a nested parameter": "method: grid\nparameters: {train: {parameters: {lr: {value: 1}}}}",
        "a test metric": "method: bayes\nrun_cap: 2\nparameters: {seed: {value: 1}}\n"
        "metric: {name: test/accuracy, goal: maximize}",
    }
    for key, value, right in list(cases())[::11]:
        if not right and value not in NEVER:
            texts[f"{key}={value:.30}"] = f"method: grid\nparameters: {{{key}: {{value: {value}}}}}"
    for name, text in texts.items():
        path.write_text(head + text)
        lab.refused(f"sweep: {name}", lab.feddg("sweep", path, "--dry-run", "scenario=ip-o-c"))


def extremes(lab: Lab) -> None:
    """Train with values at the ends of what is allowed."""
    for pair in (
        f"train.batch_size={MANY}",
        f"evaluation.batch_size={MANY}",
        "backbone.projection=65536",
        f"evaluation.every={MANY}",
        f"seed={2**63 - 1}",
        "augment.crop_scale=[1e-9, 1e-9]",
        "augment.brightness=1e300",
        "partition.alpha=1e-300 partition.kind=dirichlet partition.min_client_size=0",
        "partition.alpha=1e300 partition.kind=dirichlet",
        "train.weight_decay=1e300",
        "train.eps=1e300",
        "federation.server_lr=1e300",
        "train.optimizer=sgd train.lr=1e30",
    ):
        out = lab.folder()
        outcome = lab.feddg("run", *few(lab), "--rounds", 2, "--results", out, *pair.split(" "))
        what = outcome.sentence if outcome.code else "a record"
        lab.add(f"train with {pair}", what, outcome.code == 0 or outcome.refused)


def attack(lab: Lab) -> None:
    """Try them all."""
    for part in (pairs, flags, files, recipes, names, sweeps, extremes):
        part(lab)


def count() -> int:
    """Return how many values are tried as ``KEY=VALUE``."""
    return len(list(cases()))
