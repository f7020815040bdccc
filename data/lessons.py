"""What the bundled model is taught with: shelves that grow, sequences that repeat, spellings."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from mpic_rag.data.layout import Batch, Layout, collate
from mpic_rag.data.words import vocabulary
from mpic_rag.data.world import Question, make_shelf

QUESTIONS = 14  # about one context
TOKENS = 2800  # a batch


@dataclass(frozen=True)
class Level:
    """A size of shelf; the next one follows when `goal` of the answers are right."""

    stations: int
    pictures: int
    goal: float = 0.92


LEVELS = (
    Level(2, 0),
    Level(3, 0),
    Level(5, 0),
    Level(1, 1, 0.8),
    Level(2, 2, 0.85),
    Level(3, 3, 0.88),
    Level(5, 5, 0.9),
    Level(8, 8, 0.95),
    Level(16, 16, 2.0),
)


def choose(rng: random.Random, questions: tuple[Question, ...], count: int) -> list[Question]:
    """Questions of all kinds, about equally many of each."""
    kinds: dict[str, list[Question]] = {}
    for question in questions:
        kinds.setdefault(question.kind, []).append(question)
    chosen: list[Question] = []
    while len(chosen) < count and kinds:
        kind = rng.choice(list(kinds))
        chosen.append(kinds[kind].pop())
        if not kinds[kind]:
            del kinds[kind]
    return chosen


def draw(rng: random.Random, layout: Layout, level: int, tokens: int = TOKENS) -> Batch:
    """Shelves of one size, mostly the level's own, so that little is padded."""
    if rng.random() < (0.6 if level == len(LEVELS) - 1 else 0.35):
        level = rng.choice(range(max(0, level - 4), level + 1))
    size, talks = LEVELS[level], []
    while tokens > 0:
        if size.pictures:
            texts = rng.randint(max(0, size.stations - 1), size.stations + 1)
        else:
            texts = rng.randint(size.stations, size.stations * 2)
        shelf = make_shelf(rng, size.stations, size.pictures, texts)
        talks.append(layout.talk(rng, shelf, choose(rng, shelf.questions, QUESTIONS)))
        tokens -= len(talks[-1])
    batch = collate(talks, layout)
    batch.level = level
    return batch


def copy_batch(rng: random.Random, tokens: list[int]) -> tuple[Tensor, int]:
    """Random sequences that repeat, and their period: short ones are learned first."""
    length = rng.choice((rng.randint(4, 12), rng.randint(8, 40)))
    times = max(2, 48 // length)
    rows = [rng.choices(tokens, k=length) * times for _ in range(2400 // (times * length))]
    return torch.tensor(rows), length


class Spellings:
    """A word with a space before it differs from the bare word by one shared direction.

    Answers start with bare words that the texts have with a space: what is learned about one
    spelling must hold for the other.
    """

    def __init__(self, layout: Layout, size: int) -> None:
        self.bare, self.spaced = (
            torch.tensor([layout.encode(space + w)[0] for w in vocabulary()]) for space in ("", " ")
        )
        self.as_bare = torch.arange(size)
        self.as_spaced = self.as_bare.clone()
        self.as_bare[self.spaced], self.as_spaced[self.bare] = self.bare, self.spaced

    @torch.no_grad()
    def tie(self, table: Tensor) -> None:
        """Restores the rule in the table of embeddings."""
        bare, spaced = table[self.bare], table[self.spaced]
        middle, half = (bare + spaced) / 2, (spaced - bare).mean(dim=0) / 2
        table[self.bare], table[self.spaced] = middle - half, middle + half
