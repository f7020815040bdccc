"""Teaches the vision tower to say in words what a picture shows, before any text is read.

The features of a picture's upper part should resemble the embeddings of the words for its colour
and shape, those of the lower left and right part the two digits, with a mark to tell them apart,
and the mean of a chart's features the colour of its tallest bar. The text layers then find in a
picture what they know from texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mpic_rag.data.fast import picture_features
from mpic_rag.data.layout import GRID, MERGE, PATCH, Layout, patches
from mpic_rag.data.pictures import draw_chart, draw_sign
from mpic_rag.data.words import COLOURS, SHAPES

LOGIT_SCALE = 4.0
SHRINK = 0.003  # weight of the features' squared length, which should be like that of words
DIGITS, MARKS = tuple("0123456789"), ("(", ")")
TABLES = {  # the words, and the rows and columns of features that should resemble them
    "colour": (tuple(COLOURS), slice(0, 4), slice(0, 6)),
    "shape": (SHAPES, slice(0, 4), slice(0, 6)),
    "tallest": (tuple(COLOURS), slice(0, 6), slice(0, 6)),
    "tens": (DIGITS, slice(4, 6), slice(0, 3)),
    "ones": (DIGITS, slice(4, 6), slice(3, 6)),
    "left": (MARKS, slice(4, 6), slice(0, 3)),
    "right": (MARKS, slice(4, 6), slice(3, 6)),
}


def _draw(rng: random.Random) -> tuple[np.ndarray, dict[str, str]]:
    if rng.random() < 0.25:
        colours = rng.sample(list(COLOURS), rng.randint(3, 5))
        return patches(np.asarray(draw_chart(rng, colours))), {"tallest": colours[0]}
    facts = {"colour": rng.choice(list(COLOURS)), "shape": rng.choice(SHAPES)}
    number = rng.randint(10, 99)
    image = draw_sign(rng, facts["colour"], facts["shape"], number)
    facts |= {"tens": str(number // 10), "ones": str(number % 10), "left": "(", "right": ")"}
    return patches(np.asarray(image)), facts


Album = tuple[Tensor, list[dict[str, str]]]


def album(rng: random.Random, count: int = 64) -> Album:
    """Pictures as patches, [count, 144, 588], and the words for each."""
    drawn = [_draw(rng) for _ in range(count)]
    pixels = torch.from_numpy(np.stack([p for p, _ in drawn]))
    return pixels.view(count, GRID * GRID, 3 * PATCH * PATCH), [facts for _, facts in drawn]


def losses(model: Model, layout: Layout, shown: Album) -> Iterator[tuple[str, Tensor, float]]:
    """(table, loss, share right) for each table of words."""
    pixels, facts = shown
    side = GRID // MERGE
    features = picture_features(model, pixels).unflatten(1, (side, side))
    embeddings = model.get_input_embeddings().weight.detach()
    length = embeddings.square().sum(-1).mean()
    yield "length", SHRINK * features.square().sum(-1).mean() / length, 0.0
    for kind, (table, rows, columns) in TABLES.items():
        shown_in = [i for i, f in enumerate(facts) if kind in f]
        target = torch.tensor([table.index(facts[i][kind]) for i in shown_in])
        mean = features[shown_in, rows, columns].mean(dim=(1, 2))
        words = embeddings[[layout.encode(w)[0] for w in table]]
        logits = LOGIT_SCALE * mean @ words.T
        right = float((logits.argmax(-1) == target).float().mean())
        yield kind, F.cross_entropy(logits, target), right
