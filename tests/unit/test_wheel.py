"""Packages: what they contain, the address of their page, and the files that texts name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from hatch_build import PackagePage, absolute

ROOT = Path(__file__).parents[2]


def test_no_text_names_a_file_that_the_wheel_lacks() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    shipped = [*wheel["packages"], *wheel["force-include"]]
    files = [
        path
        for folder in (*wheel["packages"], "sweeps")
        for ending in ("py", "yaml", "html")
        for path in (ROOT / folder).rglob(f"*.{ending}")
    ]
    assert len(files) > 200
    named = {
        (str(path.relative_to(ROOT)), word)
        for path in files
        for word in re.findall(r"(?:[\w-]+/)+[\w-]+(?:\.\w+)*|\b\w+\.md\b", path.read_text())
        if (ROOT / word).exists()
        # sweep files name results folders of their commands
        and not (path.suffix == ".yaml" and (ROOT / word).is_dir())
    }
    assert ("benchmark/feddg_bench/common/files.py", "sweeps/recipes") in named
    inside = tuple(f"{folder}/" for folder in shipped)
    assert sorted(one for one in named if not f"{one[1]}/".startswith(inside)) == []


def test_the_source_package_has_no_records_and_everything_that_a_wheel_needs() -> None:
    source = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    records = {path for path in source if path.startswith("results/") and "records" in path}
    assert {path for path in records if not path.startswith("results/tuning/")} == set()
    assert {"README.md", "CHANGELOG.md", "SECURITY.md", "hatch_build.py", "Makefile"} <= source
    wheel = [*WheelBuilder(str(ROOT)).recurse_included_files()]
    needed = {str(Path(file.path).relative_to(ROOT)) for file in wheel}
    assert len(needed) > 400
    assert needed - source == set()


PAGE = """# Name
![a picture](results/a.png) [page](docs/a.md#b), [two
lines](LICENSE), [here](#name), [far](https://example.org/x.md) [mail](mailto:a@example.org)
"""


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("", PAGE),
        (
            "https://example.org/team/name",
            """# Name
![a picture](https://example.org/team/name/raw/HEAD/results/a.png) \
[page](https://example.org/team/name/blob/HEAD/docs/a.md#b), [two
lines](https://example.org/team/name/blob/HEAD/LICENSE), [here](#name), \
[far](https://example.org/x.md) [mail](mailto:a@example.org)
""",
        ),
    ],
)
def test_links_of_the_page_are_absolute_once_there_is_an_address(
    address: str, expected: str
) -> None:
    assert absolute(PAGE, address) == expected


def test_metadata_name_the_address_once_there_is_one() -> None:
    metadata = {"name": "feddg-bench"}
    PackagePage(str(ROOT), {"address": ""}).update(metadata)
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()
    assert metadata["urls"] == {}
    PackagePage(str(ROOT), {"address": "https://example.org/team/name/"}).update(metadata)
    links = re.findall(r"\]\(([^)\s]+)", metadata["readme"]["text"])
    assert [link for link in links if "://" not in link and link[0] != "#"] == []
    assert metadata["urls"] == {
        "Source": "https://example.org/team/name",
        "Issues": "https://example.org/team/name/issues",
        "Changelog": "https://example.org/team/name/blob/HEAD/CHANGELOG.md",
    }


def test_the_workflow_calls_files_and_targets_that_exist() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert ".ci/run" in steps
    assert (ROOT / ".ci/run").exists()
    assert {s.removeprefix("make ") for s in steps if s.startswith("make ")} <= targets
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/number-differs.yml").read_text())
    asked = {each["id"] for each in form["body"] if each.get("validations", {}).get("required")}
    assert {"commands", "record", "check"} <= asked
