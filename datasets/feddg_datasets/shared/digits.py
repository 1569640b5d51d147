"""Classes of digits, and their texts for text encoders."""

from __future__ import annotations

DIGITS = tuple("0123456789")
DIGIT_PROMPTS = {digit: f'a photo of the number: "{digit}"' for digit in DIGITS}
"""CLIP's texts for MNIST (Radford et al., ICML 2021; ``data/prompts.md`` of its code)."""
