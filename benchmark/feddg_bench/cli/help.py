"""Help of a command: options by panel, in one line each; ``--help --all`` also shows rare ones."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

WHAT = "What to run"
SETUP = "Setup"
DATA = "Data"
WHERE = "Where it runs"
OUTPUT = "Output"
PANELS = (WHAT, SETUP, DATA, "", WHERE, OUTPUT)
"""Panels in order; options without a panel have the empty name."""
EXAMPLES = {
    "run": """\
feddg-bench run --method fedavg,pardon --seeds 0-2
feddg-bench run --method fedprox --lambda 0.5 hyper.mu=0.1 lr=0.01
feddg-bench run --method all --protocol ltdo,lodo --dry-run""",
    "sweep": """\
feddg-bench sweep lambda --dry-run
feddg-bench sweep lambda rounds=5 --workers 2""",
    "tune": """\
feddg-bench tune --method fedavg,pardon --trials 4 --dry-run""",
    "profile": """\
feddg-bench profile --method fedavg,pardon --rounds 1""",
    "attack": """\
feddg-bench attack --method fedavg,pardon --kind membership""",
    "runs": """\
feddg-bench runs --method pardon --seeds 0-2""",
}
"""Command -> lines of examples."""
_WIDEST = 26
"""Width above which a name does not move the texts of all options."""


def option(panel: str, *names: str, rare: bool = False, **more: Any) -> Any:
    """Return an option of a panel; a rare one is shown by ``--help --all`` alone."""
    return typer.Option(*names, rich_help_panel=panel, hidden=rare, **more)


class Command(typer.core.TyperCommand):
    """A command whose help is short; hidden options are the rare ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line; ``--all`` belongs to ``--help``."""
        self.all_shown = {"--help", "--all"} <= {*args}
        return super().parse_args(ctx, ["--help"] if self.all_shown else args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the options of each panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        rare = 0
        for param in self.get_params(ctx):
            argument = param.param_type_name == "argument"
            hidden = getattr(param, "hidden", False)
            rare += hidden
            if hidden and not self.all_shown:
                continue
            panel = "Arguments" if argument else getattr(param, "rich_help_panel", None) or ""
            panel = OUTPUT if "--help" in param.opts and OUTPUT in panels else panel
            record = self._argument(param) if argument else self._option(param, ctx)
            panels.setdefault(panel, []).append(record)
        names = [name for some in panels.values() for name, _ in some if len(name) <= _WIDEST]
        width = max(map(len, names))
        for panel in ("Arguments", *PANELS):
            if records := panels.get(panel):
                with formatter.section(panel or "Options"):
                    formatter.write_dl(
                        [(name.ljust(width), text) for name, text in records], col_max=_WIDEST
                    )
        if rare and not self.all_shown:
            formatter.write_paragraph()
            options = "1 rare option" if rare == 1 else f"{rare} rare options"
            formatter.write_text(f"--help --all also shows {options}.")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))

    @staticmethod
    def _argument(param: Any) -> tuple[str, str]:
        return param.metavar or str(param.name).upper(), param.help or ""

    @staticmethod
    def _option(param: Any, ctx: Any) -> tuple[str, str]:
        """Return an option's name and text; of a pair, only the half that changes something."""
        on = param.is_flag and param.default is True
        name = param.secondary_opts[0] if on and param.secondary_opts else param.opts[0]
        if not param.is_flag:
            # Typer renamed what click calls make_metavar.
            kind = getattr(param, "display_type", None) or param.make_metavar
            name += f" {param.metavar or kind(ctx).strip('<>').upper()}"
        text = param.help or ""
        default = param.default
        if param.show_default and not param.is_flag and default not in (None, (), []):
            text += "" if "default" in text.lower() else f" (default {default})"
        return name, text
