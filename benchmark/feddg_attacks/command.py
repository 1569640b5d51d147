"""``feddg-bench attack``: what an attacker learns from the messages of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddg_attacks.records import ATTACKERS, Attacker, AttackRecord, Interval
from feddg_bench.cli import complete
from feddg_bench.cli.help import OUTPUT, SETUP, WHAT, option
from feddg_bench.cli.options import (
    Experiment,
    Json,
    Machine,
    Where,
    command,
    print_json,
    stopped,
)
from feddg_bench.common.errors import RunInterruptedError, SettingsError, unknown
from feddg_bench.common.terminal import Display, terminal, text, text_table
from feddg_bench.config.reading import listed
from feddg_bench.config.schema import MANY
from feddg_bench.plugins import names, read_plugins
from feddg_bench.records.sources import FOLDERS
from feddg_bench.runs.request import Datasets

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Attacking(Machine):
    """Where attacks are computed and recorded."""

    results: Where = FOLDERS[0]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AttackCommand(Attacking, Experiment):
    """Attack the messages of a run. Every figure comes with two controls.

    The run is made for the attack. Every client takes part in its 2 rounds. Half of the images of
    the training domains are withheld from clients: they are public images and non-members. Records
    go to RESULTS/attacks; recorded attacks are not repeated. Our kinds are membership, property,
    gradient-inversion and style-inversion; packages can add others.
    """

    kind: Annotated[
        str,
        option(
            WHAT,
            *("--kind", "--kinds"),
            metavar="NAMES",
            help="comma-separated, or all; see above",
            autocompletion=complete.names_of(lambda _: (*names("attack"), "all"), several=True),
        ),
    ] = "membership"
    attacker: Annotated[
        str, option(WHAT, metavar="NAME", help="server (default), client or eavesdropper")
    ] = ATTACKERS[0]
    sizes: Annotated[
        str | None,
        option(SETUP, metavar="LIST", help="images a client, such as 10,30,60; a run each"),
    ] = None
    items: Annotated[
        str | None,
        option(WHAT, metavar="NAMES", help="messages to attack, such as style; default all"),
    ] = None
    lpips: Annotated[
        Path | None,
        option(
            OUTPUT,
            rare=True,
            metavar="FILE",
            help="weights of torchvision's squeezenet1_1: pictures are judged by LPIPS",
        ),
    ] = None
    inception: Annotated[
        Path | None,
        option(
            OUTPUT,
            rare=True,
            metavar="FILE",
            help="weights of the Inception network that FID is defined by, as torch-fidelity has "
            "it: pictures are judged by FID, KID and the Inception Score",
        ),
    ] = None
    again: Annotated[bool, option(OUTPUT, help="repeat recorded attacks")] = False
    json_: Json = False

    def __call__(self) -> None:
        """Run the command."""
        from feddg_attacks.attack import load_attack

        kinds = read_plugins("attack", self.kind, load_attack)
        if self.attacker not in ATTACKERS:
            raise SettingsError(unknown("attacker", self.attacker, ATTACKERS))
        eyes: Attacker = self.attacker
        wanted = read_sizes(self.sizes)
        only = frozenset(listed(self.items)) if self.items else frozenset()
        resources = self.resources()
        datasets = Datasets(resources.data_root)
        request = self.request(resources)
        if request.scenario is None:
            request = request.one_scenario(datasets)

        from feddg_attacks.judges import open_judges
        from feddg_attacks.perform import Lab, attack_plans, check_items

        plans = [
            (name, plan) for name in kinds for plan in attack_plans(request, name, datasets, wanted)
        ]
        check_items(only, [plan for _, plan in plans])
        judges = open_judges(self.lpips, self.inception)
        records: list[AttackRecord] = []
        refused: list[SettingsError] = []
        with _Attacks(len(plans)) as display:
            lab = Lab(resources, display.step, judges)
            for name, plan in plans:
                display.begin(f"{plan.title}: {name}")
                try:
                    record = lab.attack(plan, name, eyes, items=only, again=self.again).only(only)
                    read = {result.item.partition(".")[0] for result in record.results}
                    if unread := sorted(only - read):
                        refused.append(
                            SettingsError(
                                f"{name} does not attack {', '.join(unread)} of {record.method}: "
                                f"it reads {load_attack(name).wants}"
                            )
                        )
                    if read or not only:
                        records.append(record)
                except SettingsError as why:  # of one method among several
                    refused.append(why)
                except RunInterruptedError as stop:
                    display.say(stopped("--again"))
                    display.say(f"{len(records)} of {len(plans)} attacks are recorded.")
                    raise typer.Exit(128 + stop.signal_number) from stop
        if refused and not records:
            raise refused[0]
        if self.json_:
            print_json([record.model_dump(mode="json") for record in records])
            return
        console = terminal()
        console.print(draw_attacks(records))
        for record in records:
            for result in record.results:
                if result.failed:
                    console.print(f"{record.method}, {record.kind} of {result.failed}")
        if any(load_attack(record.kind).judged for record in records):
            if self.lpips is None:
                console.print("LPIPS of pictures: not measured; give --lpips WEIGHTS")
            if self.inception is None:
                what = "FID, KID and Inception Score of pictures"
                console.print(f"{what}: not measured; give --inception WEIGHTS")
        for error in refused:
            console.print(str(error))


attack_command = command(AttackCommand)


def read_sizes(given: str | None) -> list[int]:
    """Return the sizes of clients in a comma-separated text.

    Raises:
        SettingsError: If one is not a positive integer.
    """
    parts = listed(given) if given else []
    if not all(part.isdecimal() and 0 < int(part) <= MANY for part in parts):
        raise SettingsError(f"cannot read --sizes {given}: expected numbers from 1, such as 10,30")
    return [int(part) for part in parts]


class _Attacks(Display):
    """Shows the progress of attacks."""

    def __init__(self, total: int) -> None:
        super().__init__(text("{task.completed:.0f}/{task.total:.0f}"))
        self.total, self.number = total, 0
        self.task = self.progress.add_task("", total=1)

    def begin(self, title: str) -> None:
        """Begin the next attack."""
        self.number += 1
        self.title = f"[{self.number}/{self.total}] {title}"
        if not self.console.is_terminal:
            self.say(self.title)

    def step(self, what: str, done: int, total: int) -> None:
        """Show how much of a step is done."""
        self.progress.update(
            self.task, description=f"{self.title}, {what}", completed=done, total=total
        )


def draw_attacks(records: Sequence[AttackRecord]) -> RichTable:
    """Return a terminal table of attack results, one row per attacked item."""
    rows = [
        (
            record.method,
            str(record.images),
            f"{record.kind}\n{result.item}\n{result.about}".strip(),
            "\n".join(f"{name.replace('_', ' ')} {_text(f)}" for name, f in figures) or "withheld",
            _text(result.no_leak.measured),
            _text(result.planted_leak.measured),
        )
        for record in records
        for result in record.results
        for figures in [result.figures.items()]
    ]
    return text_table(
        "",
        ("method", "n", "attack", "found", "no leak", "planted"),
        rows,
        caption=(
            "n: images of a client; 95 % intervals of a bootstrap over clients. No leak and "
            "planted are controls of the first figure: chance, and a leak that must be found."
        ),
        right=("n", "no leak", "planted"),
        whole=("method", "attack"),
        gap=1,
    )


def _text(figure: Interval) -> str:
    return f"{figure.value:.2f} {figure.low:.2f}-{figure.high:.2f}"
