"""Method cards: description of a method, and the real messages of a tiny run."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

from pydantic import TypeAdapter

from feddg_bench.config.layers import dotted
from feddg_bench.config.schema import PrivacySettings, Resources
from feddg_bench.plugins import method_title, outline, plugin_name
from feddg_bench.protection.possible import sent_by
from feddg_bench.records.metrics import find_metric
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Plan, Request

if TYPE_CHECKING:
    from feddg_bench.core.messages import Reply, Task
    from feddg_bench.outlines import Outline
    from feddg_bench.runs.setup import Run

CLIENTS, PER_ROUND, PER_CLIENT, ROUNDS = 4, 2, 8, 3
"""Size of the tiny run: three rounds, so that a message can depend on two earlier ones."""


SHIPPED = Path(str(resources.files("feddg_methods"))) / "cards.json"
"""Messages and kept state of built-in methods on Digits4, recorded by `tests.cards`."""


@dataclass(frozen=True)
class Item:
    """One declared item that is sent or kept."""

    name: str  # its declared name, such as `weights` or `style`
    tensors: dict[str, str]  # name -> type and shape; Python type of anything but a tensor
    bytes: int  # size; apart from its class-dependent part, a model's is equal for all data sets


@dataclass(frozen=True)
class CardMessage:
    """Message that one client sends or receives with one call."""

    direction: str  # `down` to the client or `up` to the server
    call: str  # name of the client function
    when: str  # how often, and which clients
    items: tuple[Item, ...]  # content; sizes are those of the last message seen


@dataclass(frozen=True)
class Crossing:
    """Recorded messages and kept state of a method, and deviations of its published code."""

    backbone: str  # backbone and number of classes of the recorded run
    messages: tuple[CardMessage, ...]  # messages in the order of a round
    server: tuple[Item, ...]  # state that the server keeps between rounds, besides the model
    client: tuple[Item, ...]  # state that a client keeps between its tasks
    # Operations of clients' work in a round after the first, for each of their images and local
    # epochs, by `engine.flop.Tally`.
    flop: float
    # Deviations of published code from its paper, and what the method does, as its module declares
    # in `DEVIATIONS`; `None` if it declares nothing.
    deviations: tuple[str, ...] | None


_CROSSING = TypeAdapter(Crossing)


def facts(plan: Plan) -> dict[str, Any]:
    """Return a method's own description, as JSON values; needs no PyTorch."""
    method, hyper = outline(plan.settings.method), plan.settings.hyper
    return {
        "name": plan.settings.method,
        "summary": method.doc,
        "citation": method.citation,
        "papers": [
            {"link": paper.link, "bibtex": paper.bibtex(f"{plan.settings.method}{number or ''}")}
            for number, paper in enumerate(references(method.citation))
        ],
        "requirements": list(_requirements(method)),
        "group": method.group,
        "version": plan.version,
        "settings": [
            [name, str(hyper[name]), setting.meaning]
            for name, setting in method.own.settings.items()
        ],
    }


TEXT = ("backbone.name=features", "features.encoder=open_clip:ViT-B-16/openai")
"""Settings of a card's run for a method that needs text features."""


def card_request(names: Mapping[str, Any], pairs: Sequence[str] = ()) -> Request:
    """Return the request for the run whose messages a card shows, lodo's first scenario."""
    text = outline(plugin_name("method", names["method"])).needs_text
    own = TEXT if text and not any(pair.startswith("features.") for pair in pairs) else ()
    return Request.read(flags={"protocol": "lodo", **names}, pairs=(*own, *pairs))


def shipped_card(method: str, key: str | None = None) -> Crossing | None:
    """Return the shipped messages and kept state of a built-in method; ``None`` if there are none.

    ``key`` is the key that the recorded run must have.
    """
    entry = _shipped().get(method)
    if entry is None or key not in (None, entry["key"]):
        return None
    seen = {k: v for k, v in entry.items() if k != "key"}
    return _CROSSING.validate_python({**seen, "deviations": outline(method).deviations})


def operations(method: str) -> float | None:
    """Return a built-in method's operations for an image over FedAvg's, with the same network.

    ``None`` if its card was recorded with another network, or there is none.
    """
    seen, plain = shipped_card(method), shipped_card("fedavg")
    if seen is None or plain is None or seen.backbone != plain.backbone:
        return None
    return seen.flop / plain.flop


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return measured


def see_crossing(plan: Plan) -> Crossing:
    """Run the method on a few random images, and return its messages and kept state.

    Data, clients and rounds of the plan are replaced by tiny ones.
    """
    from feddg_bench.data.federated import measured_federation
    from feddg_bench.engine.executors import SerialExecutor
    from feddg_bench.runs.driver import train
    from feddg_bench.runs.setup import start

    settings, classes = plan.settings, len(plan.dataset.classes)
    clients = 1 if settings.partition.kind == "pooled" else CLIENTS
    per_round = None if settings.federation.per_round is None else min(PER_ROUND, clients)
    tiny = settings.federation.model_copy(update={"rounds": ROUNDS, "per_round": per_round})
    plan = plan._replace(
        settings=settings.model_copy(update={"federation": tiny, "privacy": PrivacySettings()})
    )
    federation = measured_federation(settings, clients, PER_CLIENT, classes, plan.dataset)
    run = start(plan, federation, SerialExecutor(), Resources(device="cpu", workers=1))
    seen = _Listener()
    train(run, seen)
    return Crossing(
        backbone=f"{settings.backbone.name}, {classes or 'no'} classes",
        messages=tuple(seen.messages(clients, run.server.broadcast.versions)),
        server=tuple(_items(run.server.memory)),
        client=tuple(_items(seen.kept)),
        flop=seen.flop(settings.train.local_epochs),
        deviations=outline(settings.method).deviations,
    )


class _Listener(Observer):
    """Records types and shapes of all messages, the state that clients keep, and operations."""

    def __init__(self) -> None:
        from feddg_bench.engine.flop import Tally

        self.seen: dict[tuple[str, str], dict[str, Item]] = {}
        self.asked: dict[str, dict[int, int]] = {}
        self.kept: dict[str, Any] = {}
        self.images: Counter[str] = Counter()
        self.tally = Tally()

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        from feddg_bench.core.messages import content

        before = self.tally.flop
        self.tally.add(task, reply)
        if task.round > 1:
            self.images[task.call] += reply.num_examples
        else:
            self.tally.flop = before
        rounds = self.asked.setdefault(task.call, {})
        rounds[task.round] = rounds.get(task.round, 0) + 1
        down = {"weights": task.weights} if task.weights else {}
        self._note("down", task.call, {**down, **task.told})
        self._note("down", "", task.broadcast)
        self._note("up", task.call, content(reply.value))
        self.kept = reply.memory or self.kept

    def flop(self, epochs: int) -> float:
        """Return `Crossing.flop`; without training, for the images of the most frequent call."""
        trained = self.images["fit"] or max(self.images.values(), default=1)
        return round((self.tally.flop or 0.0) / (trained * epochs))

    def _note(self, direction: str, call: str, payload: Mapping[str, Any]) -> None:
        seen = self.seen.setdefault((direction, call), {})
        seen.update((item.name, item) for item in _items(payload))

    def messages(self, clients: int, versions: Mapping[str, int]) -> Iterator[CardMessage]:
        """Yield the recorded messages by call; ``versions`` counts versions of broadcasts."""
        for name, item in self.seen.get(("down", ""), {}).items():
            often = "each round it has changed" if versions.get(name, 0) > 1 else "once"
            yield CardMessage("down", "broadcast", f"{often}, to every invited client", (item,))
        for call, rounds in self.asked.items():
            phases = (("once, before round 1", 0 in rounds), ("each round", max(rounds) > 0))
            when = " and ".join(phase for phase, seen in phases if seen)
            everyone = max(rounds.values()) == clients
            who = "every client" if everyone and clients > 1 else "each sampled client"
            for direction in ("down", "up"):
                items = tuple(self.seen.get((direction, call), {}).values())
                if items:
                    yield CardMessage(direction, call, f"{when}, {who}", items)


def _items(payload: Mapping[str, Any]) -> Iterator[Item]:
    from feddg_bench.core.flaws import form_of
    from feddg_bench.core.messages import leaves, nbytes

    for name, value in payload.items():
        forms = {path: form_of(leaf) for path, leaf in leaves(value, name)}
        yield Item(name, forms, nbytes(value))


def facts_text(card: Mapping[str, Any]) -> str:
    """Return a card's first half as Markdown."""
    settings = [f"- `hyper.{n}` = `{v}`" + (f": {m}" if m else "") for n, v, m in card["settings"]]
    lines = [f"# {card['name']}", card["summary"], f"Citation: {card['citation'] or 'none given'}"]
    lines += [
        f"- <{paper['link']}>\n\n```bibtex\n{paper['bibtex']}\n```" for paper in card["papers"]
    ]
    lines += [f"Group: {card['group']}. Version {card['version']}.", "## Requirements"]
    lines += ["\n".join(f"- {need}" for need in card["requirements"]), "## Settings"]
    return "\n\n".join([*lines, "\n".join(settings or ["None."])]) + "\n"


def _requirements(method: Outline) -> Iterator[str]:
    """Yield a method's requirements on data, settings and files, as sentences."""
    yield f"Learns: {', '.join(method.tasks)}."
    yield "Images: red, green and blue." if method.rgb_only else "Images: of any channels."
    if method.client_validation:
        yield "Clients keep validation images."
    if needs := dotted(method.needs):
        yield f"Settings: {', '.join(f'`{key}={value}`' for key, value in needs.items())}."
    if files := method.own.files:
        named = ", ".join(f"`hyper.{name}`" for name in files)
        yield f"Files, for some of its settings: {named}."


def protection_text(method: Outline) -> str:
    """Return a card's list of data that leave a client, who sees them, and possible protection."""
    why = method.obstacles
    sent = ", ".join(f"`{s.name}` (`{s.call}`)" for s in sent_by(method.uplink))
    received = ", ".join(f"`{t}`" for t in ("weights", *method.downlink))
    lines = ["", "## Privacy", ""]
    lines.append(
        f"- A client sends {sent}. The server sees each client's reply, unless replies are summed."
    )
    lines.append(f"- A client receives {received}. An eavesdropper sees both directions.")
    titles = {
        "secure": "Secure sums (`privacy.aggregation=secure`)",
        "dp_client": "A guarantee for clients (`privacy.mechanism=dp_client`)",
        "dp_style": "A guarantee for data sent once (`privacy.mechanism=dp_style`)",
    }
    lines += [
        f"- {title}: {(why[key] and f'no, {why[key]}') or 'yes'}." for key, title in titles.items()
    ]
    return "\n".join(lines) + "\n"


def results_text(method: str, folders: Iterable[Path]) -> str:
    """Return a card's section on results, from the tables in and below a results folder.

    The first of ``folders`` with a table that has the method is used.
    """
    results: list[str] = []
    for folder in folders:
        paths = (*sorted(folder.glob("tables/*.csv")), *sorted(folder.glob("*/tables/*.csv")))
        results = [line for path in paths for line in _results(path, method)]
        if results:
            break
    lines = results or [
        f"No table includes it yet: `feddg-bench run --method {method}`, then `tables`."
    ]
    return "\n".join(["", "## Our results", "", *lines]) + "\n"


def _results(path: Path, method: str) -> Iterator[str]:
    """Yield the method's numbers in a table: a line for each group of columns that is not detail.

    A group has its first mean and the difference to the reference, both in one metric; a group
    without summaries has all its columns. Tables of papers are left out.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("table") == path.stem]
    leaderboard = any(path.stem.startswith(f"{row['dataset']}-") for row in rows)
    if not leaderboard and any(row["published"] for row in rows):
        return
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if (row["method"], row["row"], row["variant"]) == (method, method_title(method), ""):
            groups.setdefault(row["group"], []).append(row)
    for group, cells in groups.items():
        kinds: dict[str, dict[str, str]] = {}
        for cell in cells:
            kinds.setdefault(cell["kind"], cell)
        aside = ("val", "macro F1", "test" if "unseen" in groups else "")
        if group in filter(None, aside) or not any(cell["value"] for cell in cells):
            continue
        named = group if group not in ("test", "unseen") else ""
        where = ", ".join(filter(None, (_title(path), named)))
        if mean := kinds.get("mean"):
            held = mean["split"] if mean["split"] == "test" else "unseen"
            said = f"{find_metric(mean['metric']).title} {mean['text']} on the {held} domains"
            gap = kinds.get("difference", {})
            if any(map(str.isdigit, gap.get("text", ""))):  # none of the reference, or of its equal
                other = next(row["row"] for row in rows if row["text"] == "reference")
                said += f"; difference to {other} {_number(gap)}"
            said += f" ({mean['footnotes']})" if mean["footnotes"] else ""
        elif {*kinds} == {"measured"}:
            said = "; ".join(f"{cell['column']} {_number(cell)}" for cell in cells if cell["value"])
        else:
            continue
        yield f"- {where}: {said}"


def _number(cell: Mapping[str, str]) -> str:
    return cell["text"].lstrip("'")  # which keeps a spreadsheet from reading a sign as a formula


def _title(path: Path) -> str:
    """Return a table's title, which its Markdown file has; its name without that file."""
    page = path.with_suffix(".md")
    if not page.is_file():
        return path.stem
    with page.open(encoding="utf-8") as file:
        return re.sub(r"\\(.)", r"\1", file.readline().removeprefix("# ").strip())


def crossing_text(seen: Crossing) -> str:
    """Return a card's second half as Markdown."""
    lines = ["", f"## Messages of one client (backbone {seen.backbone})", ""]
    for message in seen.messages:
        arrow = "server → client" if message.direction == "down" else "client → server"
        lines.append(f"- {arrow}, `{message.call}`, {message.when}:")
        lines += [f"  - {_line(item)}" for item in message.items]
    lines += ["", "Each version of the model or of a broadcast is sent to a client only once."]
    for title, items in (
        ("Server state, in addition to the model", seen.server),
        ("Client state between tasks", seen.client),
    ):
        lines += ["", f"## {title}", "", *([f"- {_line(item)}" for item in items] or ["Nothing."])]
    lines += ["", "## Paper and published code", ""]
    if seen.deviations is None:
        lines.append("The author declared none.")
    else:
        lines += [f"- {sentence}" for sentence in seen.deviations] or ["No deviation is known."]
    return "\n".join(lines) + "\n"


def _line(item: Item) -> str:
    size = f"{item.bytes:,} bytes"
    if len(item.tensors) == 1:
        (form,) = item.tensors.values()
        return f"`{item.name}`: {form}, {size}"
    shown = list(item.tensors.items())
    text = "; ".join(f"`{path.removeprefix(item.name + '.')}` {form}" for path, form in shown[-3:])
    return f"`{item.name}`: {len(shown)} tensors, {size}" + (f"; the last: {text}" if text else "")


# --------------------------------------------------------- papers of a citation, as BibTeX

_PAPER = re.compile(
    r"(?P<authors>[^:]+): (?P<title>.+?), (?:(?P<venue>[A-Z][^,]*?) )?(?P<year>(?:19|20)\d\d)"
    r"(?:, arXiv (?P<arxiv>\d{4}\.\d{5}))?(?:, (?P<url>https://\S+))?(?: \(.*\))?"
)

_JOURNALS = ("JMLR", "TKDE", "TMLR")


@dataclass(frozen=True)
class Reference:
    """A paper."""

    authors: tuple[str, ...]  # as in the citation, with or without first names
    title: str
    year: str
    venue: str = ""  # such as `CVPR`; empty for a preprint
    arxiv: str = ""  # arXiv number; empty if none is given
    url: str = ""  # of its page at the publisher; empty if none is given

    @property
    def link(self) -> str:
        """URL of the paper: the given one, on arXiv, or else a search for its title in dblp."""
        if self.url or self.arxiv:
            return self.url or f"https://arxiv.org/abs/{self.arxiv}"
        return f"https://dblp.org/search?q={quote_plus(self.title)}"

    def bibtex(self, key: str) -> str:
        """Return the paper as a BibTeX entry."""
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            "journal" if self.venue in _JOURNALS else "booktitle": self.venue,
            "year": self.year,
            "eprint": self.arxiv,
            "archivePrefix": "arXiv" if self.arxiv else "",
            "url": self.url,
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        kind = "inproceedings" if self.venue else "misc"
        kind = "article" if self.venue in _JOURNALS else kind
        return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def references(citation: str) -> Iterator[Reference]:
    """Yield the papers of a citation, by semicolons: ``AUTHORS: TITLE, VENUE YEAR, arXiv NUMBER``.

    The number can be followed or replaced by a URL, ``https://...``.

    Parts of another form are left out: the citation itself is shown, too.

    >>> [(r.authors, r.venue) for r in references("A. Li and Bo: Of X: Y, ICML 2020; see there")]
    [(('A. Li', 'Bo'), 'ICML')]
    """
    for part in citation.split("; "):
        if match := _PAPER.fullmatch(part.strip()):
            authors = re.split(r", | and ", match["authors"])
            rest = (match[name] or "" for name in ("venue", "arxiv", "url"))
            yield Reference(tuple(authors), match["title"], match["year"], *rest)
