"""Recipes with their settings, from their files."""

from __future__ import annotations

from collections.abc import Iterator

from feddg_bench.config.recipes import read_recipe, recipe_names
from generators import ROOT, Page


def pages() -> Iterator[Page]:
    """Yield one page of all recipes, which shows their files."""
    text = """# Recipes

A recipe is a complete experimental setup: settings for all data sets, and exceptions for single
data sets and methods. `--recipe NAME` selects one. Copy a file to start your own, and pass its
path: `--recipe mine.yaml`.

"""
    for name in recipe_names():
        file = (ROOT / "sweeps/recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        text += f"## {name}\n\n{read_recipe(name).summary}.\n\n```yaml\n{file}```\n\n"
    yield Page("recipes.md", text)
