"""``feddg-bench run`` and ``resume``: train, record, print tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddg_bench.cli import complete
from feddg_bench.cli.help import DATA, OUTPUT, option
from feddg_bench.cli.options import (
    Experiment,
    Json,
    Machine,
    Recording,
    command,
    print_json,
    stopped,
)
from feddg_bench.common.errors import RunInterruptedError, SettingsError
from feddg_bench.common.files import from_here
from feddg_bench.common.notices import tell
from feddg_bench.common.parallel import prepare_processes
from feddg_bench.common.terminal import say, terminal
from feddg_bench.common.titles import counted
from feddg_bench.config.reading import read_names
from feddg_bench.config.schema import KEEP, Resources
from feddg_bench.plugins import method_title
from feddg_bench.records.store import open_results
from feddg_bench.runs.request import (
    Datasets,
    Plan,
    check_folders,
    check_runs,
    check_without_download,
    plan_again,
    read_seeds,
)
from feddg_bench.runs.speed import Work, forecast

if TYPE_CHECKING:
    from feddg_bench.records.record import RunRecord


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunCommand(Recording, Experiment):
    """Train methods, record every run and print a table.

    Recorded runs are not repeated, interrupted ones resume. By default: FedAvg on Digits4, ltdo,
    seed 0. KEY can be its last part: lr=0.1 is train.lr=0.1.
    """

    keep: Annotated[
        str | None,
        option(OUTPUT, metavar="NAMES", help="models to keep: last, best or last,best"),
    ] = None
    again: Annotated[bool, option(OUTPUT, help="repeat recorded runs; the old records stay")] = (
        False
    )
    dry_run: Annotated[
        bool, option(OUTPUT, help="list the runs and their status without running")
    ] = False
    verbose: Annotated[bool, option(OUTPUT, help="with --dry-run: every resolved setting")] = False
    json_: Json = False

    def __call__(self) -> None:
        """Run the command."""
        wanted = [] if self.keep is None else read_names("model to keep", self.keep, KEEP)
        resources = self.resources()
        request = self.request(resources)
        datasets = Datasets(resources.data_root)
        count = len(request.drafts(datasets)) * len(read_seeds(request.seeds))
        if not self.json_:
            dataset = datasets.open(request.dataset)
            recipe = ""
            if request.recipe is None:
                recipe = f", default recipe {dataset.default_recipe} (change with --recipe)"
            tell(f"planning {counted(count, 'run')} on {dataset.title}{recipe}")
            if not self.dry_run:
                tell("loading PyTorch takes some seconds")
        plans = request.plan(datasets, check=False)
        to_do = request.to_do(plans, wanted, again=self.again)
        if not self.again:
            check_folders(to_do, resources.results)
        if self.dry_run:
            if left := check_without_download(to_do):
                tell(f"feddg-bench: not checked: {left}")
            _list(plans, resources, wanted, verbose=self.verbose, as_json=self.json_)
        else:
            if to_do and resources.engine == "processes":
                # the worker processes load PyTorch while this one does
                prepare_processes(resources.device, resources.workers)
            check_runs(to_do)
            if not self.json_:
                from feddg_bench.runs.outlook import outlook

                console = terminal(stderr=True)
                for line in outlook(to_do, resources):
                    console.print(line, highlight=False)
            _run_all(plans, resources, keep=wanted, again=self.again, as_json=self.json_)


run_command = command(RunCommand)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ResumeCommand(Recording):
    """Resume an interrupted run from its last checkpoint."""

    run: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A run's key, or its first letters: see `feddg-bench runs`.",
            autocompletion=complete.UNFINISHED,
        ),
    ]
    json_: Json = False

    def __call__(self) -> None:
        """Run the command."""
        store = open_results(self.results)
        key = Path(self.run).stem
        begun = sorted(path.stem for path in store.checkpoints.glob("[!.]*.safetensors"))
        found = store.find(key, begun)
        if found is None:
            done = store.find(key, store.keys())
            hint = (
                f"it is finished: {from_here(store.path(done))}"
                if done
                else f"unfinished runs there: {', '.join(begun) or 'none'}"
            )
            raise SettingsError(f"no checkpoint of run {self.run!r} in {store.checkpoints}; {hint}")
        file = store.checkpoint(found)

        prepare_processes(self.device, self.workers)

        from feddg_bench.runs.checkpoints import load_checkpoint, tidy

        if store.load(found) is not None:
            tidy(store, found)
            raise SettingsError(f"run {found} is finished; the same command prints its table")
        kept = load_checkpoint(file)
        root = self.data_root or (Path(kept.data_root) if kept.data_root else None)
        plan = plan_again(kept.settings, kept.recipe, Datasets(root), kept.record.tuned)
        if plan.key != found:
            raise SettingsError(
                f"checkpoint {file} was made by another version of {plan.settings.method} or "
                f"with other file contents; delete it and run the original command again"
            )
        _run_all([plan], replace(self, data_root=root).resources(), as_json=self.json_)


resume_command = command(ResumeCommand)


def _list(
    plans: Sequence[Plan],
    resources: Resources,
    keep: Sequence[str],
    *,
    verbose: bool,
    as_json: bool,
) -> None:
    """Print one line per run: its key, state and title.

    A run that lacks a model to keep is pending: it is repeated for the model.
    """
    import yaml

    store = open_results(resources.results)
    states = [store.state(plan.key, keep) for plan in plans]
    if as_json:
        print_json(
            [
                {"key": plan.key, "run": plan.title, "state": state, "settings": plan.canonical}
                for plan, state in zip(plans, states, strict=True)
            ]
        )
        return
    lines = []
    for plan, state in zip(plans, states, strict=True):
        lines.append(f"{plan.key}  {state:7}  {plan.settings.protocol} {plan.title}")
        if verbose:
            settings = plan.settings.model_dump(mode="json")
            text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=52)
            lines += [f"    {line}" for line in text.splitlines()]
    counts = ", ".join(
        f"{states.count(state)} {state}"
        for state in ("done", "begun", "pending")
        if state in states
    )
    lines.append(f"{counted(len(plans), 'run')}: {counts} in {from_here(resources.results)}")
    pending = [Work.of(plan) for plan, state in zip(plans, states, strict=True) if state != "done"]
    say("\n".join([*lines, *forecast(pending, resources.results)]))
    if resources.device not in ("auto", "cpu"):
        from feddg_bench.engine.devices import find_devices

        try:
            find_devices(resources.device)
        except SettingsError as error:  # the runs may be meant for another machine
            tell(f"feddg-bench: these runs cannot start on this machine: {error}")


def _run_all(
    plans: Sequence[Plan],
    resources: Resources,
    *,
    keep: Sequence[str] = (),
    again: bool = False,
    as_json: bool,
) -> None:
    """Execute the runs that are not recorded yet, then print the tables."""
    from feddg_bench.analysis.tables.summary import compared, summary, summary_json
    from feddg_bench.cli.display import ConsoleReport, print_grid
    from feddg_bench.runs.driver import execute_all
    from feddg_bench.tracking.loggers import trackers

    store = open_results(resources.results)
    records: list[RunRecord] = []
    begun: list[Plan] = []

    def each() -> Iterator[Plan]:
        for plan in plans:
            begun.append(plan)
            yield plan

    try:
        with ConsoleReport(len(plans)) as report:
            observers = (report, *trackers(resources, report.say))
            records += execute_all(each(), resources, *observers, keep=keep, again=again)
    except RunInterruptedError as stop:
        key = (begun or plans[:1])[-1].key
        where = ""
        if resources.results != Resources().results:
            where = f" --results {from_here(resources.results)}"
        if resources.threads != Resources().threads:
            where += f" --threads {resources.threads}"
        if resources.logger:
            where += f" --logger {','.join(resources.logger)}"
        if resources.wandb != "off":
            where += f" --wandb {resources.wandb} --wandb-project {resources.wandb_project}"
        if again:
            tell("Stopped. The same command continues this run, and repeats the others again.")
        else:
            tell(stopped())
            if store.checkpoint(key).exists():
                tell(f"This run alone: feddg-bench resume {key}{where}")
        raise typer.Exit(128 + stop.signal_number) from stop
    protocols: dict[str, dict[str, list[RunRecord]]] = {}
    for record in records:
        of_protocol = protocols.setdefault(record.protocol, {})
        of_protocol.setdefault(record.method, []).append(record)
    tables = [summary(runs) for methods in protocols.values() for runs in methods.values()]
    several = [
        compared([record for runs in methods.values() for record in runs])
        for methods in protocols.values()
        if len(methods) > 1
    ]
    if as_json:
        print_json(
            {
                "tables": [summary_json(table, "scenario") for table in tables],
                "compared": [summary_json(table, "method") for table in several],
                "runs": [r.model_dump(mode="json", exclude={"rounds"}) for r in records],
                "files": [str(store.path(r.key)) for r in records],
            }
        )
        return
    console = terminal()
    for table in several or tables:
        print_grid(table, "method" if several else "scenario (held out)")
    places = {path.parent for path in (store.path(record.key) for record in records)}
    where = ", ".join(sorted(map(from_here, places)))
    console.print(f"Records: {where}", highlight=False, soft_wrap=True)
    folder = shlex.quote(from_here(resources.results))
    if several:
        words = f"feddg-bench tables generic --results {folder}"
        console.print(f"Each scenario: {words}", highlight=False, soft_wrap=True)
    if keep:
        which = "" if "last" in keep else f" --which {keep[0]}"
        words = f"feddg-bench predict KEY IMAGES --results {folder}{which}"
        lines = [
            f"  {r.key}  {method_title(r.method)} {r.scenario.name} seed {r.seed}" for r in records
        ]
        console.print("\n".join([f"Models: {words}", *lines]), highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProfileCommand(Machine, Experiment):
    """Profile a method's time. Compared with this machine's peak and a bare loop.

    ROUNDS are measured (default 3), after one warm-up round.
    """

    synthetic: Annotated[
        int | None,
        option(
            DATA,
            min=1,
            metavar="N",
            help="use N random images a client instead of the data",
        ),
    ] = None
    json_: Json = False

    def __call__(self) -> None:
        """Run the command."""
        resources = self.resources()
        rounds = 3 if self.rounds is None else self.rounds
        datasets = Datasets(resources.data_root)
        request = self.request(resources, rounds=rounds + 1).one_scenario(datasets)

        from feddg_bench.data.federated import measured_federation
        from feddg_bench.runs.setup import RunData, open_federation
        from feddg_bench.runs.time_profile import profile

        measured = []
        data = RunData(resources.cache_dir)
        for plan in request.plan(datasets, check=self.synthetic is None):
            if plan.settings.federation.rounds < 2:
                raise SettingsError(
                    "profile measures 1 round or more: give --rounds 1, or leave it out"
                )
            if self.synthetic:
                s, classes = plan.settings, len(plan.dataset.classes)
                clients = s.partition.count(len(plan.scenario.train))
                federation = measured_federation(s, clients, self.synthetic, classes, plan.dataset)
            else:
                federation = open_federation(plan, data)[0]
            measured.append(profile(plan, federation, resources))
        if self.json_:
            rows = [asdict(profile) for profile in measured]
            print_json(rows if len(rows) > 1 else rows[0])
            return
        from feddg_bench.cli.display import draw_overheads, draw_profile

        console = terminal()
        console.print(draw_profile(measured[0]) if len(measured) == 1 else draw_overheads(measured))


profile_command = command(ProfileCommand)
