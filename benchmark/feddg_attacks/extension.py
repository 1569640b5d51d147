"""Extension of the suite by attacks: a command, a figure, tables, part of a card, and records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from feddg_bench.common.titles import counted
from feddg_bench.extensions import Document, Extension

if TYPE_CHECKING:
    import pandas as pd

    from feddg_bench.outlines import Outline
    from feddg_bench.records.sources import Packable


class Attacks(Extension):
    """Attacks on the messages of a run."""

    figures: ClassVar[Mapping[str, str]] = {
        "utility": "Draw the key metric against what an attacker learns, under more and more noise."
    }
    grids = ("pardon-4", "fisc-9")
    documents: ClassVar[Mapping[str, str]] = {"privacy": "what attacks found"}
    commands: ClassVar[Mapping[str, str]] = {"attack": "Attack the messages of a run."}

    def command(self, name: str) -> Callable[..., None]:
        """Return ``feddg-bench attack``."""
        from feddg_attacks.command import attack_command

        return attack_command

    def draw(self, figure: str, runs: pd.DataFrame, choice: Any) -> Iterable[Any]:
        """Yield the figure of utility against leakage."""
        from feddg_attacks.records import read_attacks
        from feddg_attacks.utility import utility

        return utility(runs, read_attacks(choice.results), choice)

    def make_grids(self, wanted: Sequence[str], folders: Sequence[Path]) -> Sequence[Any]:
        """Return the papers' tables of pictures generated from styles."""
        from feddg_attacks.reconstructions import reconstruction_grid
        from feddg_attacks.records import read_attacks

        attacks = read_attacks(folders)
        return [reconstruction_grid(name, attacks) for name in wanted]

    def make_document(
        self, name: str, folders: Sequence[Path], runs: pd.DataFrame, *, anyway: bool
    ) -> Document | None:
        """Return the table ``privacy``."""
        from feddg_attacks.exposure import privacy_csv, privacy_notes, privacy_text
        from feddg_attacks.records import read_attacks
        from feddg_bench.cli.options import each_usable
        from feddg_bench.plugins import outline

        attacks = read_attacks(folders)
        if not attacks and not anyway:
            return None
        methods = dict(each_usable("method", lambda name: (name, outline(name))))
        texts = {
            "md": privacy_text(methods, attacks),
            "notes.md": privacy_notes(methods, attacks, runs["run"]),
            "csv": privacy_csv(methods, attacks, runs["run"]),
        }
        return Document(f"privacy: {counted(len(attacks), 'attack')}", texts)

    def card(self, name: str, method: Outline, folders: Sequence[Path]) -> str:
        """Return the results of attacks on the method's messages."""
        from feddg_attacks.exposure import measured_text
        from feddg_attacks.records import read_attacks

        own = [attack for attack in read_attacks(folders) if attack.method == name]
        return measured_text(name, method, own)

    def packables(self, root: Path) -> tuple[list[Packable], dict[Path, str]]:
        """Return the records of attacks."""
        from feddg_attacks.records import packables

        return packables(root)
