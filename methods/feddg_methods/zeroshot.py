"""Zero-shot classification by features of the classes' names; nothing is trained or sent."""

from __future__ import annotations

from typing import ClassVar

from feddg_bench.core.method import Method
from feddg_bench.core.server import Server


class ZeroShot(Method):
    """Zero-shot classification of CLIP (Radford et al., ICML 2021).

    The class of an image is the one whose text feature has the largest cosine with the image's
    feature. Text features are those of the data set's prompts, such as "a photo of a dog". There is
    one round, in which no client is asked.
    """

    needs_text = True
    needs: ClassVar = {
        "federation": {"rounds": 1, "per_round": None},
        "evaluation": {"start": 1, "every": 1},
    }
    uplink: ClassVar = {}
    singles = ""
    acts_on = "statistics"
    group = "reference"
    title = "Zero-shot"
    citation = (
        "Alec Radford, Jong Wook Kim, Chris Hallacy, Aditya Ramesh, Gabriel Goh, Sandhini Agarwal, "
        "Girish Sastry, Amanda Askell, Pamela Mishkin, Jack Clark, Gretchen Krueger, Ilya "
        "Sutskever: Learning Transferable Visual Models From Natural Language Supervision, ICML "
        "2021, arXiv 2103.00020"
    )

    def run_round(self, server: Server) -> None:
        """Leave the model as it is."""


DEVIATIONS = (
    "The authors average the features of 80 prompts for ImageNet. Here each class has one prompt.",
)
"""Where published code differs from its paper, and what this module does."""
