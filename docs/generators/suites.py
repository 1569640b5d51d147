"""Comparison with other suites: facts with the version, the date and the file that shows each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from feddg_bench import __version__
from feddg_bench.plugins import load_dataset
from generators import Page, table
from generators.cards import built_in

ROWS = (
    "version",
    "training",
    "methods",
    "data sets with domains",
    "split over clients",
    "test on unseen domains",
    "repeated runs",
    "resume",
    "attacks and defences",
    "tests",
    "licence",
)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Suite:
    """Facts about a suite, each with the files of its repository that show it.

    A fact that is missing here is shown as unknown.
    """

    name: str
    repository: str  # on GitHub
    commit: str
    date: str
    facts: dict[str, tuple[str, str]]  # row -> fact, files that show it


SUITES = (
    Suite(
        "FedDG_Benchmark",
        "inouye-lab/FedDG_Benchmark",
        "da58f76",
        "2025-06-05",
        {
            "training": ("federated", "src/server.py"),
            "methods": ("14 in its README", "README.md"),
            "data sets with domains": (
                "PACS, Office-Home, FEMNIST, and WILDS such as iWildCam, Camelyon17 and CelebA",
                "src/datasets.py, README.md",
            ),
            "split over clients": (
                "one number from 0, a domain each, to 1, IID",
                "src/splitter.py",
            ),
            "test on unseen domains": (
                "published splits; one domain left out",
                "src/splitter.py, main.py",
            ),
            "resume": ("a model file and the number of its round", "main.py"),
            "tests": ("none found", "list of files"),
            "licence": ("no file found", "list of files"),
        },
    ),
    Suite(
        "MarsFL",
        "WenkeHuang/MarsFL",
        "581283b",
        "2026-03-16",
        {
            "training": ("federated", "main.py"),
            "methods": ("28 files in `Methods`", "Methods"),
            "data sets with domains": (
                "Digits, PACS, VLCS, Office-31, Office-Caltech, Office-Home",
                "Datasets/federated_dataset/multi_domain",
            ),
            "split over clients": (
                "by domain; Dirichlet over classes",
                "main.py, Datasets/federated_dataset/single_domain/utils/single_domain_dataset.py",
            ),
            "test on unseen domains": ("one domain left out (task OOD)", "main.py, utils/cfg.py"),
            "attacks and defences": (
                "Byzantine and backdoor clients; Krum, trimmed mean and others",
                "Attack, Sever",
            ),
            "tests": ("none found", "list of files"),
            "licence": ("no file found", "list of files"),
        },
    ),
    Suite(
        "PFLlib",
        "TsingZ0/PFLlib",
        "d832e76",
        "2025-11-29",
        {
            "training": ("federated, personalised", "README.md"),
            "methods": ("39 in its README", "README.md"),
            "data sets with domains": (
                "Amazon Review, Digit5, DomainNet; Camelyon17, iWildCam and others by origin",
                "README.md",
            ),
            "split over clients": ("IID, pathological, Dirichlet, natural", "README.md"),
            "test on unseen domains": ("new clients", "README.md"),
            "repeated runs": (
                "mean and deviation of the best accuracy",
                "system/utils/result_utils.py",
            ),
            "attacks and defences": ("gradient inversion (DLG)", "README.md"),
            "tests": ("none found", "list of files"),
            "licence": ("Apache-2.0", "LICENSE"),
        },
    ),
    Suite(
        "FedPRC",
        "qqh0618/FedPRC",
        "1847476",
        "2026-06-23",
        {
            "training": ("federated", "README.md"),
            "methods": ("more than 40 in its README, 13 for unseen domains", "README.md"),
            "data sets with domains": (
                "PACS, Office-31, Office-Home, DomainNet, Digits",
                "README.md",
            ),
            "split over clients": ("by domain; Dirichlet over classes", "README.md"),
            "test on unseen domains": ("one domain left out", "core/Server/ServerBase.py"),
            "tests": ("none found", "list of files"),
            "licence": ("no file found", "list of files"),
        },
    ),
    Suite(
        "DomainBed",
        "facebookresearch/DomainBed",
        "b93c22a",
        "2024-12-31",
        {
            "training": ("in one place", "domainbed/scripts/train.py"),
            "methods": ("34 names in `ALGORITHMS`", "domainbed/algorithms.py"),
            "data sets with domains": ("11 in its README", "README.md"),
            "split over clients": ("no clients", "domainbed/scripts/train.py"),
            "test on unseen domains": ("one or two domains left out", "domainbed/scripts/sweep.py"),
            "repeated runs": (
                "mean and standard error over trials, three rules of selection",
                "domainbed/scripts/collect_results.py, README.md",
            ),
            "resume": ("finished runs are skipped", "domainbed/scripts/sweep.py"),
            "tests": ("10 files", "domainbed/test"),
            "licence": ("MIT", "LICENSE"),
        },
    ),
    Suite(
        "Flower",
        "adap/flower",
        "fdef7af",
        "2026-03-29",
        {
            "version": ("flwr 1.28.0", "framework/pyproject.toml"),
            "training": ("federated; simulated or on devices", "framework"),
            "methods": (
                "strategies such as FedAvg, FedProx, FedAdam; baselines as folders",
                "framework/py/flwr/serverapp/strategy, baselines",
            ),
            "data sets with domains": ("none of its own: flwr-datasets loads any", "datasets"),
            "split over clients": (
                "IID, Dirichlet, shards, pathological, natural and others",
                "datasets/flwr_datasets/partitioner",
            ),
            "attacks and defences": (
                "Krum, Bulyan, median, trimmed mean; differential privacy",
                "framework/py/flwr/serverapp/strategy",
            ),
            "tests": ("165 files named `*_test.py`", "list of files"),
            "licence": ("Apache-2.0", "LICENSE"),
        },
    ),
)


def pages() -> Iterator[Page]:
    """Yield the page of the comparison."""
    columns = [_ours(), *map(_column, SUITES)]
    heads = ("", "feddg-bench", *(suite.name for suite in SUITES))
    rows = ((row, *(column.get(row, UNKNOWN) for column in columns)) for row in ROWS)
    sources = "\n".join(map(_sources, SUITES))
    yield Page(
        "suites.md",
        f"""# Other suites

Facts about this suite and six others: what their files show at one commit. *Unknown* means that no
file was found that shows it, not that it is missing. Numbers of methods are those that a suite
states or lists; nobody has checked here whether they follow their papers.

{table(heads, rows)}

[Methods](methods/index.md), [data sets](datasets/index.md) and [benchmarks against a plain loop,
pfl-research and Flower](results/benchmarks.md) describe this suite further.

## Sources

{sources}
""",
    )


def _ours() -> dict[str, str]:
    sets = [load_dataset(name) for name in built_in("data set")]
    planted = sum(each.title.startswith("Planted") for each in sets)
    return {
        "version": __version__,
        "training": "federated; ERM in one place as a reference",
        "methods": f"[{len(built_in('method'))}](methods/index.md)",
        "data sets with domains": f"[{len(sets)}](datasets/index.md), of which {planted} planted "
        "worlds",
        "split over clients": "lambda from 0, a domain each, to 1, IID; Dirichlet over domains or "
        "classes; pathological; natural",
        "test on unseen domains": "one or two domains left out; published splits; new clients",
        "repeated runs": "intervals over sets of training domains, Holm's procedure, power",
        "resume": "the same bits, for any number of workers",
        "attacks and defences": "four attacks on privacy with controls; secure sums, differential "
        "privacy; no Byzantine clients",
        "tests": "every formula, every method's contract",
        "licence": "Apache-2.0",
    }


def _column(suite: Suite) -> dict[str, str]:
    told = {row: fact for row, (fact, _) in suite.facts.items()}
    return told | {"version": f"{told.get('version', suite.commit)}, {suite.date}"}


def _sources(suite: Suite) -> str:
    home = f"https://github.com/{suite.repository}"
    lines = [
        f"- {row}: {', '.join(_link(home, suite.commit, file) for file in files.split(', '))}"
        for row, (_, files) in suite.facts.items()
    ]
    first = f"### {suite.name}\n\n[{suite.repository}]({home}) at commit `{suite.commit}` of "
    return f"{first}{suite.date}.\n\n" + "\n".join(lines) + "\n"


def _link(home: str, commit: str, file: str) -> str:
    if file == "list of files":
        return f"[{file}]({home}/tree/{commit})"
    return f"[`{file}`]({home}/tree/{commit}/{file})"
