"""CCST's style bank: the styles that clients sent, and how they are drawn from it.

A style is [2, C]. Whatever is drawn comes from a generator on the CPU, and clients are taken by
name in ascending order, so that a seed means the same styles everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from feddg_methods.shared.draws import draw_rows

Styles = Mapping[str, Tensor]
"""Styles by kind, [J, 2, C] each: ``overall`` of all images, ``single`` of one image each."""

Bank = Mapping[str, Styles]
"""What each client sent; all sent the same kinds."""


def without(bank: Bank, client: str) -> dict[str, Styles]:
    """Return the bank without a client's own styles."""
    return {name: bank[name] for name in sorted(bank) if name != client}


def pooled(bank: Bank) -> dict[str, Tensor]:
    """Return all styles of each kind, [J, 2, C]; nothing if the bank is empty."""
    kinds = next(iter(bank.values()), {})
    return {kind: torch.cat([bank[name][kind] for name in sorted(bank)]) for kind in kinds}


def draw_kind(styles: Styles, generator: torch.Generator) -> Tensor:
    """Return the styles [J, 2, C] of one kind; all kinds are equally likely."""
    kinds = sorted(styles)
    return styles[kinds[int(torch.randint(len(kinds), (), generator=generator))]]


def draw_style(styles: Styles, generator: torch.Generator) -> Tensor:
    """Return one style [2, C] of a client, first its kind and then which."""
    rows = draw_kind(styles, generator)
    return rows[int(torch.randint(len(rows), (), generator=generator))]


def draw_clients(bank: Bank, count: int, generator: torch.Generator) -> Tensor:
    """Return a style each [K, 2, C] of ``count`` clients, or of all where there are fewer."""
    names = sorted(bank)
    drawn = draw_rows(len(names), min(count, len(names)), generator).tolist()
    return torch.stack([draw_style(bank[names[i]], generator) for i in drawn])


def draw_for_images(
    bank: Bank, own: str, size: int, count: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw for every image ``count`` clients without replacement, its own among them.

    Args:
        bank: Of all clients, at least one.
        own: Client that holds the images.
        size: Number of images B.
        count: K; clipped to the number of clients.
        generator: On the CPU.

    Yields:
        K times the drawn styles [B, 2, C], and which images drew their own client [B], bool.
    """
    names = sorted(bank)
    order = torch.rand(size, len(names), generator=generator).argsort(1)[:, :count]  # (B, K)
    for column in order.T.tolist():
        drawn = [names[i] for i in column]
        styles = torch.stack([draw_style(bank[name], generator) for name in drawn])
        yield styles, torch.tensor([name == own for name in drawn])
