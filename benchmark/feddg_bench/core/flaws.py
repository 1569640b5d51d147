"""Faults that exclude a payload from aggregation: name, shape, type, NaN, infinity, huge number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddg_bench.common.errors import PluginError
from feddg_bench.core.messages import leaves

Form = str | Mapping[str, str]
"""The form that a client's payload must have.

For a dict of model tensors: ``model``, ``model without PREFIX`` or ``model within PREFIX`` (names
then lack the prefix), with ``part of`` before it if tensors may be missing. Otherwise: the
`form_of` a number, or of every tensor in the payload, or several forms
separated by `` | ``. In place of a size, a capital letter stands for a number that all clients
share, and a small letter for one that is the same throughout one reply. "" allows everything. A
mapping gives a form to each key of a dict, and all keys must be present.
"""

_MODEL = re.compile(r"(part of )?model(?: (within|without) (.+))?")

_HUGE = 2.0**64
"""About the square root of the largest float32."""


class Flaw(NamedTuple):
    """A fault of a payload.

    Attributes:
        name: Path of the tensor or number.
        reason: What is wrong, as a phrase that follows the name.
        form: Whether its name, shape or type is wrong, rather than its value.
    """

    name: str
    reason: str
    form: bool = False


def form_of(leaf: Any) -> str:
    """Return a tensor's type and shape, or the type of anything else.

    >>> form_of(torch.zeros(2, 512)), form_of(3)
    ('float32 [2, 512]', 'int')
    """
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def check_loss(method: object, loss: Any) -> None:
    """Check the return value of a method's training step.

    Raises:
        PluginError: If it is not a tensor with one number.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = form_of(loss) if loss is not None else "nothing"
        raise PluginError(
            f"training_step of {type(method).__name__} returned {found}; expected the loss of the "
            f"batch, a tensor with one number"
        )


def misfit(weights: Any, model: Mapping[str, Tensor], *, whole: bool = True) -> Flaw | None:
    """Return the first difference in names, shapes or types between a state and ``model``, if any.

    Args:
        weights: Tensors by name, or anything else.
        model: The expected tensors by name.
        whole: Whether all names of the model must be present.
    """
    if not isinstance(weights, Mapping):
        return Flaw("", f"is a {type(weights).__name__}, expected tensors by name", form=True)
    for name in model if whole else ():
        if name not in weights:
            return Flaw(name, "is missing", form=True)
    for name, found in weights.items():
        if name not in model:
            return Flaw(str(name), "is not part of the model", form=True)
        like = model[name]
        if not (
            isinstance(found, Tensor) and found.shape == like.shape and found.dtype == like.dtype
        ):
            return Flaw(name, f"is {form_of(found)}, expected {form_of(like)}", form=True)
    return None


def misform(
    name: str, value: Any, form: Form, model: Mapping[str, Tensor], sizes: MutableMapping[str, int]
) -> Flaw | None:
    """Return the first difference between a sent value and its declared form, if any.

    Args:
        name: Name of the value.
        value: What the client sends.
        form: See `Form`.
        model: The global model.
        sizes: The number that each letter stands for, as far as known; new letters are added.
    """
    if not isinstance(form, str):
        if not isinstance(value, Mapping) or value.keys() != form.keys():
            return Flaw(name, f"is not a dict of {', '.join(form)}", form=True)
        flaws = (misform(f"{name}.{k}", value[k], form[k], model, sizes) for k in form)
        return next(filter(None, flaws), None)
    match = _MODEL.fullmatch(form)
    if match is not None:
        part, how, prefix = match.groups()
        if how == "within":
            model = {n.removeprefix(prefix): t for n, t in model.items() if n.startswith(prefix)}
        elif how == "without":
            model = {n: t for n, t in model.items() if not n.startswith(prefix)}
        flaw = misfit(value, model, whole=not part)
        return flaw and flaw._replace(name=f"{name}.{flaw.name}".rstrip("."))
    for path, leaf in leaves(value, name) if "[" in form else [(name, value)] if form else ():
        if not any(_fits(leaf, one, sizes) for one in form.split(" | ")):
            known = [f"{size} = {n}" for size, n in sizes.items() if f" {size}" in form]
            where = f" with {', '.join(known)}" if known and isinstance(leaf, Tensor) else ""
            return Flaw(path, f"is {form_of(leaf)}, expected {form}{where}", form=True)
    return None


def _fits(leaf: Any, form: str, sizes: MutableMapping[str, int]) -> bool:
    """Return whether a tensor or number has a form without alternatives; see `misform`."""
    kind, tensor, shape = form.partition(" [")
    if not tensor or not isinstance(leaf, Tensor):
        return form_of(leaf) == form
    wanted = shape[:-1].split(", ") if shape != "]" else []
    return (
        f"torch.{kind}" == str(leaf.dtype)
        and len(wanted) == leaf.dim()
        and all(
            number == (int(size) if size.isdigit() else sizes.setdefault(size, number))
            for size, number in zip(wanted, leaf.shape, strict=True)
        )
    )


def nonfinite(found: Iterable[tuple[str, Any]]) -> Flaw | None:
    """Return the first of a payload's `leaves` that must not enter a sum, if any.

    These are NaN and infinity, and in tensors also numbers whose square overflows float32: a mean
    model that holds them trains to NaN.
    """
    tensors = {}
    for name, leaf in found:
        if isinstance(leaf, Tensor):
            if (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel():
                tensors[name] = leaf if leaf.element_size() > 1 else leaf.float()
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            return Flaw(name, "is NaN or infinity")
    if not tensors:
        return None
    # The 2-norm bounds the largest absolute value from above, and takes a tenth of the time.
    if all(norm < _HUGE / 2 for norm in _norms(tensors.values(), 2)):
        return None
    for name, size in zip(tensors, _norms(tensors.values(), torch.inf), strict=True):
        if not size < _HUGE:
            number = f"{size:.3g}, too large a number" if math.isfinite(size) else "NaN or infinity"
            return Flaw(name, f"holds {number}")
    return None


def _norms(tensors: Iterable[Tensor], order: float) -> list[float]:
    first, *rest = torch._foreach_norm(list(tensors), order)
    norms = [norm if norm.device == first.device else norm.to(first.device) for norm in rest]
    found: list[float] = torch.stack([first, *norms]).tolist()
    return found
