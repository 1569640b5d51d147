"""Work on the maps of a backbone's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError


def check_stages(backbone: Any, name: str, given: int | Sequence[int]) -> None:
    """Check that the backbone has these stages, which are numbered from 1.

    Args:
        backbone: A backbone, with or without `stages`.
        name: The method's setting that names them.
        given: Its value.

    Raises:
        SettingsError: If it lacks one of them.
    """
    available = len(getattr(backbone, "stages", ()))
    numbers = [given] if isinstance(given, int) else list(given)
    wrong = [number for number in numbers if not 1 <= number <= available]
    if wrong:
        value = given if isinstance(given, int) else numbers
        raise SettingsError(
            f"hyper.{name}={value} names stage {wrong[0]}, and this backbone has {available}: "
            f"choose numbers from 1 to {available}, or another backbone.name"
        )


@contextmanager
def changed(stage: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the maps of a stage, [B, C, H, W], in the forward passes of the block."""
    hook = stage.register_forward_hook(lambda _stage, _inputs, maps: change(maps))
    try:
        yield
    finally:
        hook.remove()
