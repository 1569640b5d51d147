"""``feddg-bench profile``: where a method's time goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from feddg_bench.cli.options import Experiment, Json, Machine, command, print_json
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.terminal import terminal
from feddg_bench.runs.request import Datasets


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProfileCommand(Machine, Experiment):
    """Measure where a method's time goes. Compared with this machine's peak and a bare loop.

    ROUNDS are measured (default 3), after one more that warms up.
    """

    synthetic: Annotated[
        int | None,
        typer.Option(min=1, help="Use random images, this many a client, instead of the data."),
    ] = None
    json_: Json = False

    def __call__(self) -> None:
        """Run the command."""
        resources = self.resources()
        rounds = 3 if self.rounds is None else self.rounds
        datasets = Datasets(resources.data_root)
        request = self.request(resources, rounds=rounds + 1).one_scenario(datasets)

        from feddg_bench.engine.timing import synthetic_federation
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
                clients, size = plan.settings.partition.clients, plan.settings.data.image_size
                classes = len(plan.dataset.classes)
                federation = synthetic_federation(
                    clients, self.synthetic, size, classes, like=plan.dataset
                )
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
