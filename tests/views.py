"""Losses of given views, and the views that a run makes: FedCCRL and FedAlign."""

from __future__ import annotations

from torch import nn

from tests.helpers import as_images


class Scores(nn.Module):
    """Gives the views their logits, in the order of the calls."""

    def __init__(self, logits):
        super().__init__()
        self.logits = iter(logits)

    def forward(self, z):
        return next(self.logits) + 0 * z.sum()


def loss_of_views(method, views, labels, logits):
    """Return the loss of a method with backbone `Features`, for features and logits of each view.

    The first view is the original.
    """
    method.classifier = Scores(logits)
    later = iter(views[1:])
    method.view = lambda *_: as_images(next(later))
    return method.training_step((as_images(views[0]), labels), 0)


def views_made(run):
    """Run a round; return source and result of both views of each step."""
    seen, make = [], run.method.view

    def noted(images, own):
        seen.append((images, make(images, own)))
        return seen[-1][1]

    run.method.view = noted
    run.rounds(1)
    assert seen
    return zip(seen[::2], seen[1::2], strict=True)
