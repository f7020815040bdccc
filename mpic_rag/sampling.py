"""The next token: greedy, or drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """How to choose; temperature 0 takes the likeliest token, a seed makes draws repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0")


class Sampler:
    """Draws the tokens of one answer."""

    def __init__(self, sampling: Sampling) -> None:
        self.greedy = sampling.temperature == 0
        # Drawn on the CPU, so that a seed gives the same answer on every device.
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)
        self.warpers = LogitsProcessorList()
        if not self.greedy:
            self.warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: torch.Tensor) -> int:
        """Choose from logits [1, vocabulary]."""
        if self.greedy:
            return int(logits.argmax())
        chances = self.warpers(None, logits).softmax(-1).cpu()
        return int(torch.multinomial(chances, 1, generator=self.generator))
