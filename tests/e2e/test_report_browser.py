"""The report in headless Chromium: it opens, sorts, filters, shows runs, and requests nothing.

The script of the site sorts its tables, too.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from tests import fabricate_records as fabricate  # noqa: E402

pytestmark = pytest.mark.nightly

HOSTILE = "</script><script>window.hit=1</script><img src=http://e.invalid/ onerror='window.hit=2'>"
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}


def first_of(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def feddg(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "feddg_bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder: two data sets, two protocols, five methods, three seeds, one hostile run."""
    root = tmp_path_factory.mktemp("report")
    fabricate.population(root, 120, rounds=5)
    drop = {"dropped": [{"client": "client_001", "tensor": "head"}], "skipped": True}
    lonely = fabricate.record(
        HOSTILE,
        "folder",
        scenario=HOSTILE,
        domains=((HOSTILE, "ink"), HOSTILE, "poster"),
        recipe="mine",
        entries={2: drop},
    )
    fabricate.save(root, lonely)
    (root / "figures").mkdir()
    picture = Path(__file__).parents[2] / "results" / "figures" / "digits4.png"
    shutil.copy(picture, root / "figures")
    return root


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    said = feddg("report", "--results", results)
    assert "121 runs, 4 tables, 1 figure" in said
    return results / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = first_of("chromium", "chromium-browser", "google-chrome")
    driver = first_of("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and chromedriver (Debian: chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # as root, Chromium does not start with its sandbox
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


class Report:
    """The page, newly opened, with queries for tests."""

    def __init__(self, browser: Any, page: Path, view: str = "") -> None:
        self.browser = browser
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get("about:blank")
        browser.get(f"{page.as_uri()}{view}")
        self.until("return document.body.dataset.drawn === 'yes'")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def choose(self, name: str, value: str) -> None:
        self.js(
            "const e = document.querySelector(`[name=${arguments[0]}]`); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}))",
            name,
            value,
        )

    def until(self, script: str) -> None:
        """Wait until a script returns true; a closing dialog reports it a moment later."""
        WebDriverWait(self.browser, 10).until(lambda _: self.js(script))

    def tables(self) -> list[str]:
        found: list[str] = self.js(
            "return [...document.querySelectorAll('#tables h2')].map(e => e.innerText)"
        )
        return found

    def column(self, table: str, number: int) -> list[str]:
        """Return the texts of a column from top to bottom, without stars; column 0: methods."""
        texts: list[str] = self.js(
            "return [...document.querySelectorAll(`[data-table='${arguments[0]}'] tbody tr`)]"
            ".map(r => (r.children[arguments[1]].querySelector('button') ?? r.children[0])"
            ".innerText)",
            table,
            number,
        )
        return [text.removeprefix("★ ") for text in texts]

    def heads(self, table: str) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll(`[data-table='${arguments[0]}'] .sort`)]"
            ".map(e => e.dataset.sort)",
            table,
        )

    def sort(self, table: str, name: str) -> str:
        """Click a column head, and return the sort order that it then states."""
        find = f"[data-table='{table}'] [data-sort='{name}']"
        self.js("document.querySelector(arguments[0]).click()", find)
        return self.js("return document.querySelector(arguments[0]).closest('th').ariaSort", find)

    def open(self, table: str, row: str, column: str) -> str:
        """Click a cell, and return the dialog's text."""
        self.js(
            "const key = JSON.stringify([...arguments]);"
            "[...document.querySelectorAll('.cell')].find(e => e.dataset.cell === key).click()",
            table,
            row,
            column,
        )
        assert self.js("return document.getElementById('dialog').open")
        return self.js("return document.getElementById('dialog').innerText")

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def requests(self) -> set[str]:
        messages = [
            json.loads(e["message"])["message"] for e in self.browser.get_log("performance")
        ]
        urls = {
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        }
        return {url for url in urls if not url.startswith("data:")}


@pytest.fixture
def report(browser: Any, page: Path) -> Iterator[Report]:
    opened = Report(browser, page)
    yield opened
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert opened.complaints() == []
    assert opened.requests() <= {page.as_uri()}
    assert opened.js("return window.hit") is None


LTDO = "digits4-ltdo-quick"
LEAD = "iqm"
"""The first summary of that table: some of its runs collapse."""


def numbers(texts: list[str]) -> list[float]:
    return [float(text.split(" ")[0]) for text in texts]


def test_it_opens_with_the_numbers_of_the_tables(
    report: Report, results: Path, tmp_path: Path
) -> None:
    titles = report.tables()
    synthetic = [title.startswith("Digits4") for title in titles]
    assert synthetic == sorted(synthetic)
    assert sorted(titles)[:2] == [
        "Digits4, leave one domain out, recipe quick",
        "Digits4, leave two domains out, recipe quick",
    ]
    assert report.heads(LTDO)[0] == "method"
    summaries = [LEAD, "test", "id_test", "difference", "p_value", "excess"]
    assert report.heads(LTDO)[1:7] == summaries
    shared = [LEAD, "test", "id_test", "difference", "excess"]
    feddg("tables", "generic", "--results", results, "--out", tmp_path, "--format", "csv")
    with (tmp_path / f"{LTDO}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["group"] == "unseen"]
    heads = ("IQM", "test", "id_test mean", "difference", "at equal id_test")
    for name, head in zip(shared, heads, strict=True):
        shown = dict(
            zip(
                report.column(LTDO, 0),
                report.column(LTDO, report.heads(LTDO).index(name)),
                strict=True,
            )
        )
        texts = {row["row"]: row["text"] for row in rows if row["column"] == head}
        assert shown == {row: text.removeprefix("'") for row, text in texts.items()}
        assert len(shown) == 5
    picture = "return document.querySelector('#figures img').naturalWidth"
    assert report.js(picture) > 0


def test_sorting_by_every_column_in_both_directions(report: Report) -> None:
    for number, name in enumerate(report.heads(LTDO)):
        orders = {}
        for _ in range(2):
            direction = report.sort(LTDO, name)
            texts = report.column(LTDO, number)
            while texts[-1] in ("reference", "\N{EN DASH}"):  # entries without a number come last
                texts.pop()
            values = texts if name == "method" else numbers(texts)
            assert values == sorted(values, reverse=direction == "descending")
            orders[direction] = report.column(LTDO, 0)
        assert set(orders) == {"ascending", "descending"}
        assert orders["ascending"] != orders["descending"]
        marked = "return document.querySelectorAll(\"[data-table='%s'] th[aria-sort$=ing]\").length"
        assert report.js(marked % LTDO) == 1


def test_sorting_by_keyboard(report: Report) -> None:
    head = f"[data-table='{LTDO}'] [data-sort=id_test]"
    report.js("document.querySelector(arguments[0]).focus()", head)
    before = report.column(LTDO, 0)
    for _ in range(2):  # the page is redrawn, and the head keeps the focus
        report.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert report.js("return document.activeElement.dataset.sort") == "id_test"
    direction = "return document.activeElement.closest('th').ariaSort"
    assert report.js(direction) == "ascending"
    assert report.column(LTDO, 0) != before


def test_filters_and_the_address_that_keeps_them(report: Report, page: Path) -> None:
    report.choose("dataset", "digits4")
    assert sorted(report.tables()) == [
        "Digits4, leave one domain out, recipe quick",
        "Digits4, leave two domains out, recipe quick",
    ]
    report.choose("protocol", "ltdo")
    assert report.tables() == ["Digits4, leave two domains out, recipe quick"]
    report.choose("recipe", "mine")
    assert report.tables() == []
    assert "No table fits" in report.js("return document.getElementById('status').innerText")
    report.choose("recipe", "")
    last = report.column(LTDO, 1)
    report.choose("rule", "best_by_val")
    assert report.column(LTDO, 1) != last
    report.choose("split", "id_test")
    report.choose("metric", "loss")
    report.choose("q", "fed, moon")
    assert sorted(report.column(LTDO, 0)) == ["FedAvg", "FedProx", "MOON"]
    report.sort(LTDO, "mean")
    columns = range(len(report.heads(LTDO)))
    shown = [report.column(LTDO, number) for number in columns]
    view = report.js("return location.hash")
    again = Report(report.browser, page, view)
    assert [again.column(LTDO, number) for number in columns] == shown
    assert again.js("return document.querySelector('[name=rule]').value") == "best_by_val"
    again.js("document.querySelector('[type=reset]').click()")
    assert len(again.tables()) == 4
    assert again.js("return location.hash") == ""


def test_the_oracle_is_no_default_and_carries_a_warning(report: Report) -> None:
    warning = "return document.querySelector('#rule').className"
    assert report.js(warning) == ""
    report.choose("rule", "oracle")
    assert report.js(warning) == "warning"
    assert "ORACLE" in report.js("return document.querySelector('#rule').innerText")


def test_published_numbers_can_be_switched(browser: Any, tmp_path: Path) -> None:
    frame = fabricate.in_frame("pardon", "pacs", "pardon")
    named: dict[str, Any] = {"scenario": "cs-a-p", "recipe": "pardon", "settings": frame}
    domains = (("cartoon", "sketch"), "art_painting", "photo")
    fabricate.save(tmp_path, fabricate.record("pardon", "pacs", domains=domains, **named))
    feddg("report", "--results", tmp_path)
    own = Report(browser, tmp_path / "report.html")
    shown = "return [...document.querySelectorAll('td .published')].map(e => e.innerText)"
    texts = own.js(shown)
    assert any("93.05" in text for text in texts)
    assert all("paper" in text and "(" in text for text in texts)
    own.js("document.querySelector('[name=published]').click()")
    assert own.js(shown) == []


def test_a_cell_opens_its_runs(report: Report, results: Path, page: Path) -> None:
    said = report.open(LTDO, "PARDON", "ip-o-c")
    records = [json.loads(path.read_bytes()) for path in (results / "runs").iterdir()]
    mine = [
        record
        for record in records
        if (record["method"], record["dataset"]) == ("pardon", "digits4")
        and record["scenario"]["name"] == "ip-o-c"
    ]
    assert len(mine) == 3
    for record in mine:
        accuracy = record["rounds"][-1]["evaluation"]["test"]["chalk"]["accuracy"]
        assert f"{100 * accuracy:.2f}" in said
        assert record["key"] in said
    assert "0123456789ab" in said  # the commit
    assert "2.00 MB" in said
    lines = (
        "return [...document.querySelectorAll('#dialog-body > figure polyline')]"
        ".map(e => e.points.length)"
    )
    assert report.js(lines) == [5, 5, 5]
    report.js("document.querySelectorAll('details.run summary').forEach(e => e.click())")
    said = report.js("return document.getElementById('dialog').innerText")
    for seed in (0, 1, 2):
        assert f"--scenario ip-o-c --seeds {seed}" in said
    for words in (
        "train.lr=0.001",
        "aggregation",
        "0.250 s",
        "1.500 s",
        "torch 2.15.0",
        "1000 MiB",
    ):
        assert words in said
    view = report.js("return location.hash")
    report.js("document.getElementById('close').click()")
    assert not report.js("return document.getElementById('dialog').open")
    report.until("return document.activeElement.className === 'cell'")
    assert report.js("return location.hash") == ""
    linked = Report(report.browser, page, view)
    assert linked.js("return document.querySelector('#dialog[open] h2').innerText").startswith(
        "PARDON"
    )


def test_variants_and_details_are_folded(browser: Any, tmp_path: Path) -> None:
    for name in ("fedavg", "moon"):
        fabricate.save(tmp_path, *(fabricate.record(name, seed=seed) for seed in range(2)))
    fabricate.save(tmp_path, fabricate.record("moon", settings={"train": {"lr": 0.5}}))
    feddg("report", "--results", tmp_path)
    own = Report(browser, tmp_path / "report.html")
    assert [name.rstrip("12") for name in sorted(own.column(LTDO, 0))] == ["FedAvg", "MOON"]
    said = "return document.querySelector('main').innerText"
    assert "lr=0.5" not in own.js(said)
    own.js("document.querySelector('.varied summary').click()")
    own.until("return document.querySelectorAll('[data-table]').length === 2")
    (row,) = own.column(f"{LTDO}-variants", 0)
    assert row.startswith("MOON (lr=0.5)")
    assert "--scenario ip-o-c" in own.open(f"{LTDO}-variants", "MOON (lr=0.5)", "ip-o-c")
    own.js("document.getElementById('close').click()")
    assert "Selection rule" not in own.js(said)
    own.js("document.querySelector('.notes summary').click()")
    assert "Selection rule last: last round." in own.js(said)
    line = "return document.querySelector('.notes .caption').innerText"
    assert len(own.js(line).split()) <= 40


def test_escape_and_back_close_the_dialog(report: Report) -> None:
    closed = "return !document.getElementById('dialog').open && !location.hash"
    said = report.open(LTDO, "FedAvg", LEAD)
    assert "12 runs" in said
    report.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    report.until(closed)
    report.open(LTDO, "FedAvg", "id_test")
    report.browser.back()
    report.until(closed)


def test_colour_is_never_the_only_sign(report: Report) -> None:
    starred = "return [...document.querySelectorAll('td')].map(e => [e.className, e.innerText])"
    cells = report.js(starred)
    assert {name for name, text in cells if text.startswith("★")} == {"top"}
    assert all(text.startswith("★") for name, text in cells if name == "top")
    report.open(LTDO, "PARDON", LEAD)
    dashes = report.js(
        "return [...document.querySelectorAll('#dialog-body > figure .legend line')]"
        ".map(e => getComputedStyle(e).strokeDasharray)"
    )
    assert len(set(dashes)) == len(dashes) == 4


def test_costs_and_loss_open_too(report: Report) -> None:
    report.choose("metric", "cost")
    assert report.heads(LTDO)[1:3] == ["MB up a round", "MB down a round"]
    assert "12 runs" in report.open(LTDO, "MOON", "MB up a round")
    report.js("document.querySelector('details.run summary').click()")
    assert report.js("return document.querySelectorAll('details.run polyline').length") == 4
    report.js("document.getElementById('close').click()")
    report.until("return !location.hash.includes('cell')")
    report.choose("metric", "loss")
    assert "loss" in report.open(LTDO, "MOON", "mean")


def test_hostile_text_is_shown_as_text(report: Report) -> None:
    (row,) = report.column("folder-ltdo-mine", 0)
    assert row.startswith(HOSTILE)  # followed by a footnote
    said = report.open("folder-ltdo-mine", HOSTILE, HOSTILE)
    assert HOSTILE in said
    assert "client_001 (head)" in said
    assert "1 of them skipped" in said
    assert report.js("return document.querySelectorAll('img').length") == 1


def test_the_policy_stops_what_would_slip_in(browser: Any, page: Path) -> None:
    opened = Report(browser, page)
    with socket.create_server(("127.0.0.1", 0)) as server:
        outside = f"http://127.0.0.1:{server.getsockname()[1]}/"
        opened.js(
            "const script = document.createElement('script');"
            "script.textContent = 'window.hit = 1';"
            "const image = document.createElement('img'); image.src = arguments[0];"
            "document.body.append(script, image)",
            outside,
        )
        ask = "return fetch(arguments[0]).then(() => 'sent', () => 'refused')"
        assert opened.js(ask, outside) == "refused"
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):  # no request arrived
            server.accept()
    assert opened.js("return window.hit") is None
    assert sum("Content Security Policy" in said for said in opened.complaints()) >= 3


def test_a_phone_scrolls_tables_inside_the_page(report: Report) -> None:
    report.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    width = "return [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"
    assert report.js(width) == [360, 360, 360]
    box = f"document.querySelector(\"[data-table='{LTDO}']\").parentElement"
    assert report.js(f"return {box}.scrollWidth > {box}.clientWidth")
    first = f"{box}.querySelector('tbody th').getBoundingClientRect().left"
    before = report.js(f"return {first}")
    report.js(f"{box}.scrollLeft = 120")
    assert report.js(f"return {first}") == before  # the methods stay visible
    report.open(LTDO, "FedAvg", LEAD)
    report.js("document.querySelectorAll('details.run summary').forEach(e => e.click())")
    assert report.js(
        "const d = document.getElementById('dialog'); return d.scrollWidth <= d.clientWidth"
    )
    assert report.js(width) == [360, 360, 360]


def test_dark_and_light_are_readable(report: Report) -> None:
    """Text has a contrast of at least 4.5 with its background (WCAG AA)."""
    measure = """
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (text) => {
      const [r, g, b] = parse(text).slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (e) => {
      for (; e; e = e.parentElement) {
        const colour = getComputedStyle(e).backgroundColor;
        if (parse(colour)[3] !== 0) return colour;
      }
      return 'rgb(255, 255, 255)';
    };
    const texts = 'p, h1, h2, th, td, small, b, .published, label, li, button';
    return [...document.querySelectorAll(texts)]
      .filter((e) => e.offsetParent && e.innerText).map((e) => {
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      });
    """
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        report.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        found = report.js(measure)
        assert len(found) > 100
        assert min(found) >= 4.5


TABLE = """<!doctype html><script>{}</script>
<table class="sortable"><thead><tr><th>method<th>mean<th>bytes</thead>
<tbody><tr><td>PARDON<td>+1.3 [-0.5, +3.1]<td>1,000
<tr><td>afl<td>reference<td>9; once 24
<tr><td>FedAvg <sup>1</sup><td>-2 <sup>1</sup><td>20
<tr><td>Ditto<td>&ndash;<td></table>
<details id="runs-ditto"><summary>Ditto</summary>keys</details>"""


def test_tables_of_the_site_sort_by_numbers_and_texts_and_links_open_runs(
    browser: Any, tmp_path: Path
) -> None:
    script = (Path(__file__).parents[2] / "docs/static/sort.js").read_text()
    (tmp_path / "page.html").write_text(TABLE.format(script))
    browser.get(f"{(tmp_path / 'page.html').as_uri()}#runs-ditto")
    assert browser.execute_script("return document.querySelector('details').open")

    def order(column: int) -> str:
        browser.execute_script(f"document.querySelectorAll('th')[{column}].click()")
        first = "[...document.querySelectorAll('tbody tr')].map(r => r.cells[0].innerText[0])"
        return str(browser.execute_script(f"return {first}.join('')"))

    assert [order(0), order(0)] == ["aDFP", "PFDa"]
    assert [order(1), order(1)] == ["PFaD", "FPaD"]  # texts after numbers, nothing at the end
    assert [order(2), order(2)] == ["PFaD", "aFPD"]
    heads = "return [...document.querySelectorAll('th')].map(h => h.getAttribute('aria-sort'))"
    assert browser.execute_script(heads) == [None, None, "ascending"]
