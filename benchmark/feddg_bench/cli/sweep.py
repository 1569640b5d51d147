"""``feddg-bench sweep`` and ``tune``: W&B sweep files without an account, equal tuning."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from feddg_bench.cli import complete
from feddg_bench.cli.help import OUTPUT, SETUP, WHERE, option
from feddg_bench.cli.options import Machine, Names, Recording, command, stopped
from feddg_bench.common.errors import FeddgError, RunInterruptedError, SettingsError
from feddg_bench.common.files import from_here
from feddg_bench.common.notices import tell
from feddg_bench.common.parallel import cores
from feddg_bench.common.terminal import say, terminal, text_table
from feddg_bench.common.titles import counted
from feddg_bench.config.schema import Resources
from feddg_bench.plugins import method_title
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.rules import SPLITS
from feddg_bench.records.store import open_results
from feddg_bench.records.tuning import FOLDER, TuningLedger, ledger_path
from feddg_bench.runs.request import (
    Datasets,
    check_folders,
    check_weights,
    check_without_download,
    say_cautions,
)
from feddg_bench.runs.speed import Work, forecast
from feddg_bench.sweeps.jobs import Failures, swept_settings, titles
from feddg_bench.sweeps.leases import Leases

if TYPE_CHECKING:
    from feddg_bench.data.image_store import OnDecoded
    from feddg_bench.records.record import RunRecord
    from feddg_bench.sweeps.definition import Sweep
    from feddg_bench.sweeps.jobs import Job
    from feddg_bench.sweeps.search import Search


@dataclass(frozen=True)
class SweepRecording(Recording):
    """Where a sweep's runs are computed and recorded."""

    workers: Annotated[
        int,
        option(
            WHERE,
            metavar="N",
            help="runs at a time; 0: one per core or per GPU (default)",
        ),
    ] = 0

    def resources(self) -> Resources:
        """Return the options as checked resources; the engine may be Slurm."""
        return Machine.resources(self)


@dataclass(frozen=True)
class Slurm:
    """Resources that ``--engine slurm`` requests from a cluster."""

    jobs: Annotated[
        int,
        option(WHERE, min=1, metavar="N", help="with --engine slurm: number of jobs"),
    ] = 1
    gpus_per_job: Annotated[
        int,
        option(WHERE, min=0, metavar="N", rare=True, help="GPUs of each job"),
    ] = 0
    time: Annotated[
        str,
        option(
            WHERE,
            rare=True,
            metavar="TIME",
            help="limit of each job, which is queued again until all is done",
        ),
    ] = "4:00:00"
    partition: Annotated[
        str | None, option(WHERE, rare=True, metavar="NAME", help="Slurm partition")
    ] = None
    slurm: Annotated[
        list[str] | None,
        option(
            WHERE,
            rare=True,
            metavar="KEY[=VALUE]",
            help="another option of sbatch or submitit, such as mem=16G; repeatable",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SweepCommand(Slurm, SweepRecording):
    """Run a W&B sweep file, without an account or a network.

    Recorded runs are not repeated, interrupted ones resume, failed ones are kept with their error.
    If started on several machines with a shared results folder, they share the runs. --engine slurm
    or ray starts it on a cluster.
    """

    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="as for `wandb sweep`; or a name such as ltdo",
            autocompletion=complete.SWEEP,
        ),
    ]
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="replace the file's; commas between several values",
            autocompletion=complete.pairs,
        ),
    ] = None
    dry_run: Annotated[bool, option(OUTPUT, help="list the runs without running")] = False
    retry_failed: Annotated[bool, option(OUTPUT, help="try failed runs again")] = False

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.sweeps.definition import load_sweep

        resources = self.resources()
        array = Slurm(self.jobs, self.gpus_per_job, self.time, self.partition, self.slurm)
        if resources.engine != "slurm" and array != Slurm():
            raise SettingsError(
                "--jobs, --gpus-per-job, --time, --partition and --slurm are for jobs of Slurm: "
                "give --engine slurm with them"
            )
        sweep = load_sweep(self.file, self.pairs or ())

        from feddg_bench.sweeps.search import open_search

        datasets = Datasets(resources.data_root)
        search = open_search(sweep, resources.results, datasets)
        if self.dry_run:
            _check(search, datasets, resources.results)
            say(listing(f"{sweep.name}, {sweep.method}", search, resources.results))
        if resources.engine == "slurm":
            _submit(
                search,
                datasets,
                resources,
                array,
                dry_run=self.dry_run,
                retry_failed=self.retry_failed,
            )
        if self.dry_run or resources.engine == "slurm":
            return
        failed = finish(search, datasets, resources, retry_failed=self.retry_failed)
        _draw(sweep.name, search, resources.results)
        say(_summary(sweep, search, resources.results))
        if failed:
            raise typer.Exit(1)


sweep_command = command(SweepCommand)


def _check(search: Search, datasets: Datasets, results: Path) -> None:
    """Check the runs to do without computing; name the checks that are not possible here.

    Raises:
        SettingsError: If a run would be refused; the message names the first.
    """
    over, _ = _finished(search, results)
    plans = [job.plan(datasets, results) for job in search.jobs() if job.key not in over]
    check_folders(plans, results)
    try:
        left = check_without_download(plans)
    except FeddgError:
        for plan in plans:
            try:
                check_without_download([plan])
            except FeddgError as error:
                raise SettingsError(f"{plan.title} would fail: {error}") from error
        raise
    if left:
        tell(f"feddg-bench: not checked: {left}")


def finish(search: Search, datasets: Datasets, resources: Resources, *, retry_failed: bool) -> bool:
    """Execute the remaining runs and return whether one failed; if stopped, say how to resume."""
    try:
        return _run(search, datasets, resources, retry_failed=retry_failed)
    except RunInterruptedError as stop:
        over, total = _finished(search, resources.results)
        print(
            f"{stopped('--retry-failed')}\n{len(over)} of {counted(total, 'run')} finished.",
            file=sys.stderr,
        )
        raise typer.Exit(128 + stop.signal_number) from stop


def _run(search: Search, datasets: Datasets, resources: Resources, *, retry_failed: bool) -> bool:
    from feddg_bench.cli.display import Board
    from feddg_bench.engine.devices import find_devices
    from feddg_bench.engine.gpu import placement
    from feddg_bench.runs.checkpoints import tidy
    from feddg_bench.sweeps.workers import Copy, work_in_processes, work_on_ray

    store = open_results(resources.results)
    store.check_writable()
    leases = Leases.of(resources.results)
    leases.check()
    devices = ["cpu"] if resources.engine == "ray" else find_devices(resources.device)
    if retry_failed:
        _retry(search, resources.results)
    copy = Copy(search, resources.model_copy(update={"workers": 1}))

    def finished() -> tuple[set[str], int]:
        return _finished(search, resources.results)

    named: dict[str, str] = {}

    def title(key: str) -> str:
        if key not in named:  # a search has found new jobs
            named.update(titles(search.jobs()))
        return named.get(key, key)

    with Board(title, finished) as board:
        _prepare(search, datasets, resources, board.decoding)
        over, total = finished()
        wanted = resources.workers or (cores() if devices == ["cpu"] else len(devices))
        count = max(1, min(wanted, total - len(over)))
        if resources.engine == "ray":
            work_on_ray(Copy(search, resources), board.say, finished)
        elif count == 1:
            copy.work(board.tell)
        else:
            work_in_processes(copy, placement(devices, count), board.tell)
    keys = {job.key for job in search.jobs()}
    recorded = keys & store.keys()
    tidy(store, *recorded)
    leases.forget(recorded)
    return recorded != keys


def _submit(
    search: Search,
    datasets: Datasets,
    resources: Resources,
    slurm: Slurm,
    *,
    dry_run: bool,
    retry_failed: bool,
) -> None:
    """Submit workers for the remaining runs, or print the script."""
    from feddg_bench.sweeps.workers import (
        Copy,
        shared,
        slurm_executor,
        slurm_parameters,
        slurm_script,
        submit,
    )

    if resources.workers > 1:
        raise SettingsError("each job of Slurm makes one run at a time: give --jobs, not --workers")
    parameters = slurm_parameters(
        jobs=slurm.jobs,
        threads=resources.threads,
        gpus=slurm.gpus_per_job,
        time=slurm.time,
        partition=slurm.partition,
        options=slurm.slurm or (),
    )
    folder = (resources.results / "slurm").resolve()
    if dry_run:
        print(slurm_script(parameters, folder))
        return
    executor = slurm_executor(parameters, folder)
    Leases.of(resources.results).check()
    if retry_failed:
        _retry(search, resources.results)
    _prepare(search, datasets, resources, lambda _done, _total: None)
    over, total = _finished(search, resources.results)
    ids = submit(executor, Copy(search, shared(resources)), min(slurm.jobs, total - len(over)))
    say(
        f"{len(over)} of {counted(total, 'run')} finished; {counted(len(ids), 'job')} for the "
        f"others: {', '.join(ids) or 'none'}; logs in {folder}"
    )


def _retry(search: Search, results: Path) -> None:
    """Forget that runs failed, and that workers died over them."""
    keys = [job.key for job in search.jobs()]
    Failures(results).forget(keys)
    Leases.of(results).forget(keys)


def _prepare(search: Search, datasets: Datasets, resources: Resources, progress: OnDecoded) -> None:
    """Check existing records, decode images once for all workers, and find features and weights.

    Raises:
        DataError: If data or weights cannot be found, or a record was made from other data.
        SettingsError: If weights do not fit.
    """
    from feddg_bench.runs.driver import recorded
    from feddg_bench.runs.setup import RunData

    store = open_results(resources.results)
    data = RunData(resources.cache_dir)
    for job in search.jobs():
        dataset = datasets.open(job.dataset).adjusted(job.world)
        if recorded(store, data, dataset, job.encoding, job.key, job.tuned) is None:
            if job.encoding is None:
                data.store(dataset, job.data, progress)
            else:
                data.features(dataset, job.encoding)
    over = store.keys() | Failures(resources.results).keys()
    to_do = [job for job in search.jobs() if job.key not in over]
    own = [job for job in to_do if datasets.open(job.dataset).identity]
    check_folders([job.plan(datasets, store.root) for job in own], store.root)
    points = {job.group: job for job in to_do}
    plans = [job.plan(datasets, store.root) for job in points.values()]
    say_cautions(plans)
    check_weights(plans)


def _finished(search: Search, results: Path) -> tuple[set[str], int]:
    """Return the jobs that are recorded or have failed, and the total number of jobs."""
    keys = {job.key for job in search.jobs()}
    over = keys & (open_results(results).keys() | Failures(results).keys())
    return over, len(keys) + search.left()


def listing(name: str, search: Search, results: Path) -> str:
    """Return the runs of a sweep with the state of each, as text."""
    store, failed = open_results(results), Failures(results).keys()
    holders, lines = Leases.of(results).held(), list[str]()
    jobs = search.jobs()
    named, pending = titles(jobs), list[Work]()
    counts = {"done": 0, "failed": 0, "begun": 0, "pending": 0}
    for job in jobs:
        state = store.state(job.key)
        if state != "done" and job.key in failed:
            state = "failed"
        counts[state] += 1
        pending += [job.work] * (state in ("begun", "pending"))
        lines.append(f"{job.key}  {state:7}  {named[job.key]}")
        if job.key in holders:
            lines.append(f"  held by {holders[job.key]}")
    facts = ", ".join(f"{n} {state}" for state, n in counts.items() if n) or "none begun yet"
    if search.left():
        lines.append(f"and at most {search.left()} {search.unit} more, which depend on the results")
    lines.append(f"{name}: {counted(len(jobs), 'run')}: {facts}")
    return "\n".join([*lines, *forecast(pending, results)])


def _draw(name: str, search: Search, results: Path) -> None:
    """Print the recorded runs of a sweep: means over scenarios and seeds, by method and setting."""
    store, jobs = open_results(results), search.jobs()
    own, recorded = swept_settings(jobs), store.keys()
    groups: dict[tuple[str, str, str], list[RunRecord]] = {}
    for job in jobs:
        if job.key in recorded and (record := store.load(job.key)) is not None:
            words = ", ".join(own[job.key])
            groups.setdefault((record.method, record.protocol, words), []).append(record)
    if not groups:
        return
    records = [record for some in groups.values() for record in some]
    splits = [s for s in SPLITS if any(record.score(s) is not None for record in records)]
    rows = []
    for (method, protocol, words), some in islice(groups.items(), _MOST):
        row = [method_title(method), protocol, words, str(len(some))]
        for split in splits:
            scores = [score for r in some if (score := r.score(split)) is not None]
            row.append(some[0].metric.text(fmean(scores), 2) if scores else "")
        rows.append(row)
    heads = ["method", "protocol", "settings", "runs", *splits]
    kept = [n for n, head in enumerate(heads) if head != "settings" or any(row[n] for row in rows)]
    metrics = ", ".join(dict.fromkeys(record.metric.label for record in records))
    more = len(groups) - len(rows)
    terminal().print(
        text_table(
            f"{name}: {metrics}, last round",
            [heads[n] for n in kept],
            [[row[n] for n in kept] for row in rows],
            caption="Means over scenarios and seeds."
            + f" {more} more: feddg-bench runs --results {from_here(results)}" * bool(more),
            right=("runs", *splits),
            whole=("method", "runs", *splits),
        ),
        highlight=False,
    )


_MOST = 60
"""Maximum number of rows of the table after a sweep."""


def _summary(sweep: Sweep, search: Search, results: Path) -> str:
    """Return the summary of a finished sweep: counts, failures, and the best settings."""
    from feddg_bench.sweeps.search import mean_objective

    store, failures = open_results(results), Failures(results)
    jobs = list(search.jobs())
    recorded = store.keys()
    named = titles(jobs)
    errors = {key: failures.error(key) for key in named if key not in recorded}
    lines = [
        f"{sweep.name}: {len(jobs) - len(errors)} of {counted(len(jobs), 'run')} in "
        f"{from_here(store.runs)}"
    ]
    if errors:
        lines.append(_failures_text(errors, named))
        lines.append("try them again with --retry-failed")
    goal = sweep.objective
    if goal is not None:
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.group, []).append(job)
        ranked = sorted(
            (
                (mean_objective(sweep, store, made), group, len(made))
                for group, made in groups.items()
                if recorded.issuperset(job.key for job in made)
            ),
            key=lambda entry: (  # a loss that overflowed is the worst
                math.isnan(entry[0]),
                -entry[0] if goal.maximize else entry[0],
                entry[1],
            ),
        )
        lines.append(f"best by {goal.name}, mean over scenarios and seeds:")
        lines += [f"  {value:.4f}  {group}  ({_runs(n)})" for value, group, n in ranked[:5]]
    return "\n".join(lines)


def _runs(n: int) -> str:
    return f"{n} run{'s' if n > 1 else ''}"


def _failures_text(errors: Mapping[str, str], titles: Mapping[str, str]) -> str:
    """Return the failures of a sweep as text, grouped by error."""
    by_error: dict[str, list[str]] = {}
    for key, error in errors.items():
        by_error.setdefault(error, []).append(f"{titles[key]} ({key})")
    return "\n".join(
        f"{len(who)} failed: {error}\n  {', '.join(who[:5])}{', ...' if len(who) > 5 else ''}"
        for error, who in by_error.items()
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TuneCommand(SweepRecording, Names):
    """Try equally many settings for every method and record the best.

    It tries the learning rate first, then the method's own ranges, on one scenario and seeds that
    no table uses (default 100-102). The recipe's settings stay unless others lead by more than
    noise over at least three seeds. Selection uses only held-out images of the training domains. If
    stopped, the same command resumes, and machines can share the work as for `sweep`.
    RESULTS/tuning holds the trials and the ledgers that `run --tuned` reads.
    """

    trials: Annotated[
        int,
        option(SETUP, min=1, max=1000, metavar="N", help="trials of each method"),
    ] = 8
    ranges: Annotated[
        Path | None,
        option(
            SETUP,
            metavar="DIR",
            help="sweep files METHOD.yaml with ranges; default our own",
        ),
    ] = None
    race: Annotated[bool, option(SETUP, help="stop trials that can no longer lead clearly")] = False
    dry_run: Annotated[bool, option(OUTPUT, help="list the trials without running")] = False
    retry_failed: Annotated[bool, option(OUTPUT, help="make failed trials again")] = False

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.sweeps.trials import SEEDS, Worths, open_tuning

        resources = self.resources()
        if resources.engine == "slurm":
            raise SettingsError(
                "tune takes no --engine slurm: start the same command in several jobs"
            )
        tunings, search = open_tuning(
            self.request(resources, SEEDS), self.trials, self.ranges, race=self.race
        )
        inner = resources.model_copy(update={"results": resources.results / FOLDER})
        if self.dry_run:
            _check(search, Datasets(resources.data_root), inner.results)
            name = f"{counted(len(tunings), 'method')}, {counted(self.trials, 'trial')} each"
            say(listing(name, search, inner.results))
            return
        datasets = Datasets(resources.data_root)
        try:
            failed = finish(search, datasets, inner, retry_failed=self.retry_failed)
        finally:  # stopped or not, finished ledgers are saved
            worths = Worths(inner.results)
            ledgers = [t.ledger(worths) for t in tunings if t.is_done(worths)]
            for ledger in ledgers:
                ledger.save(resources.results)
        first = ledgers[0]
        frame = first.dataset, first.protocol, first.recipe
        place = ledger_path(resources.results, *frame, first.method).parent
        _show(ledgers, find_metric(first.metric, tunings[0].plan.dataset.task), place)
        if failed:
            say("trials that failed can be made again with --retry-failed")
            raise typer.Exit(1)


tune_command = command(TuneCommand)


def _show(ledgers: Sequence[TuningLedger], metric: Metric, place: Path) -> None:
    """Print a table of each method's tuning."""
    from feddg_bench.records.differences import assignments

    first = ledgers[0]
    rows = []
    for ledger in ledgers:
        values = [
            None if t.id_val is None else f"{metric.display(t.id_val):.2f}" for t in ledger.trials
        ]
        seconds = sum(trial.seconds or 0 for trial in ledger.trials)
        settings = ", ".join(assignments(ledger.settings)) or "the recipe's own"
        won = None if ledger.chosen is None else ledger.trials[ledger.chosen]
        chosen = "-" if ledger.chosen is None else values[ledger.chosen]
        result = "every trial failed" if won is None else settings
        lead = "-"
        if won and won.lead is not None and won.standard_error is not None:
            shown = metric.display(won.lead), metric.display(won.standard_error)
            lead = "{:+.2f} ± {:.2f}".format(*shown)
        rows.append(
            (ledger.method, values[0] or "-", chosen or "-", lead, result, f"{seconds:.0f}")
        )
    seeds = f"seed{'s' * (len(first.seeds) > 1)} {', '.join(map(str, first.seeds))}"
    title = f"{first.dataset}, {first.protocol} {first.scenario}, recipe {first.recipe}"
    drawn = text_table(
        f"{title}, {seeds}: {counted(len(first.trials), 'trial')} each",
        ("method", "recipe", "tuned", "lead", "settings", "seconds"),
        rows,
        caption=f"{metric.title} on held-out images of the training domains, mean of the last "
        f"rounds. Settings replace the recipe's if they lead by more than noise (lead ± standard "
        f"error). `run --tuned` takes them: {from_here(place)}",
        right=("recipe", "tuned", "lead", "seconds"),
        whole=("method",),
    )
    terminal().print(drawn, highlight=False)
