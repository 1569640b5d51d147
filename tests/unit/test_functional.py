"""Formulas in `feddg_methods.functional`: complete, with the documented arguments."""

from __future__ import annotations

import inspect

import pytest
import torch

from feddg_bench.plugins import names
from feddg_methods import functional

SIGNATURES = {
    "finch": "rows, *, distance='cosine'",
    "finch_gram": "gram",
    "adain": "content, mean, std, strength=1.0",
    "cluster_style": "maps, labels, *, sigma='mixture'",
    "interpolation_style": "styles, *, preset='released'",
    "triplet_loss": "z, z_styled, labels, *, margin, negatives='random_one', generator=None",
    "supervised_contrastive": "z, labels, *, temperature, reduction='mean', count_self=False",
    "jensen_shannon": "probabilities",
    "prototype_loss": "z, labels, prototypes, *, temperature, divide_by='matched'",
    "conditional_mutual_information": "mean, std, reference_mean, reference_std, labels, *, "
    "scale=1.0",
    "masked_update": "deltas, shares, *, threshold, below='score', compare='ge', variant='paper'",
    "align": "deltas, *, strength, reading='running', order=None, only_conflicts=True",
    "project_conflicts": "deltas, *, order=None, reduction='mean'",
    "agreement_sum": "deltas, *, reduction='mean'",
    "agreement_random": "deltas, *, reduction='mean', generator",
    "adjusted_weights": "weights, gaps, *, round, rounds, step, variant='default'",
    "simplex_projection": "point",
    "coral_distance": "source, target",
    "squared_mmd": "x, y, gammas=(0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)",
    "low_amplitudes": "images, alpha",
    "exchange_amplitudes": "images, amplitudes, lam",
    "restyle": "images, mean, std, mix",
}


def test_all_are_there_with_their_documented_arguments():
    assert dir(functional) == sorted(SIGNATURES)
    for name, documented in SIGNATURES.items():
        signature = inspect.signature(getattr(functional, name))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == f"({documented})", name
        assert inspect.getdoc(getattr(functional, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="alignn"):
        _ = functional.alignn
    assert "functional" not in names("method")


def test_they_compute():
    from feddg_methods.functional import agreement_sum, align

    deltas = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    assert agreement_sum(deltas).tolist() == [0, 0]
    assert align(deltas, strength=0.1).tolist() == pytest.approx([-0.04, 0.52])
