"""The methods' formulas as plain functions, importable by name.

Every function takes and returns plain tensors, keeps no state and draws random numbers only from
the generator it is given. Each is defined in its method's file and imported on first access:

    from feddg_methods.functional import align, finch
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddg_methods.afl import simplex_projection as simplex_projection
    from feddg_methods.agrrand import agreement_random as agreement_random
    from feddg_methods.agrsum import agreement_sum as agreement_sum
    from feddg_methods.coral import coral_distance as coral_distance
    from feddg_methods.fedccrl import jensen_shannon as jensen_shannon
    from feddg_methods.fedccrl import restyle as restyle
    from feddg_methods.fedccrl import supervised_contrastive as supervised_contrastive
    from feddg_methods.feddg import exchange_amplitudes as exchange_amplitudes
    from feddg_methods.feddg import low_amplitudes as low_amplitudes
    from feddg_methods.feddg_ga import adjusted_weights as adjusted_weights
    from feddg_methods.fedgma import masked_update as masked_update
    from feddg_methods.fedsr import conditional_mutual_information as conditional_mutual_information
    from feddg_methods.fpl import prototype_loss as prototype_loss
    from feddg_methods.mmd import squared_mmd as squared_mmd
    from feddg_methods.pardon import cluster_style as cluster_style
    from feddg_methods.pardon import interpolation_style as interpolation_style
    from feddg_methods.pardon import triplet_loss as triplet_loss
    from feddg_methods.pcgrad import project_conflicts as project_conflicts
    from feddg_methods.ppdg import align as align
    from feddg_methods.shared.adain import adain as adain
    from feddg_methods.shared.finch import finch as finch
    from feddg_methods.shared.finch import finch_gram as finch_gram

_HOMES = {
    "adain": "shared.adain",
    "adjusted_weights": "feddg_ga",
    "agreement_random": "agrrand",
    "agreement_sum": "agrsum",
    "align": "ppdg",
    "cluster_style": "pardon",
    "conditional_mutual_information": "fedsr",
    "coral_distance": "coral",
    "exchange_amplitudes": "feddg",
    "finch": "shared.finch",
    "finch_gram": "shared.finch",
    "interpolation_style": "pardon",
    "jensen_shannon": "fedccrl",
    "low_amplitudes": "feddg",
    "masked_update": "fedgma",
    "project_conflicts": "pcgrad",
    "prototype_loss": "fpl",
    "restyle": "fedccrl",
    "simplex_projection": "afl",
    "squared_mmd": "mmd",
    "supervised_contrastive": "fedccrl",
    "triplet_loss": "pardon",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"feddg_methods.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
