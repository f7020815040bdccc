"""Token layout of a conversation about a shelf: ids, M-RoPE positions, pictures, answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from mpic_rag.data import words
from mpic_rag.data.words import SYSTEM
from mpic_rag.data.world import Question, Shelf

GRID = 12  # patches a side of a 168 x 168 picture
PATCH, MERGE = 14, 2
TOKENS = (GRID // MERGE) ** 2
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)

FILLERS = ["the", "of", "is", "at", "by", "keeps", "ships", "opened", "in", "kept", "called"]


def patches(image: np.ndarray) -> np.ndarray:
    """A picture as the image processor cuts it, without the doubled time axis: [144, 3, 14, 14]."""
    pixels = (image.astype(np.float32) / 255 - MEAN) / STD
    side = GRID // MERGE
    grid = pixels.transpose(2, 0, 1).reshape(3, side, MERGE, PATCH, side, MERGE, PATCH)
    return grid.transpose(1, 4, 2, 5, 0, 3, 6).reshape(GRID * GRID, 3, PATCH, PATCH)


@dataclass
class Conversation:
    """One context with the turns that follow it; `answers` holds (first, end, kind) spans."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # first token of each picture
    answers: list[tuple[int, int, str]] = field(default_factory=list)
    next_position: int = 0


class Layout:
    """Tokenises each piece on its own and joins the ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.encode = cache(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.pad, self.vision_start, self.vision_end, self.image = (
            tokenizer.convert_tokens_to_ids(t)
            for t in ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
        )

    def _text(self, talk: Conversation, text: str) -> None:
        self._ids(talk, self.encode(text))

    def _ids(self, talk: Conversation, ids: list[int]) -> None:
        talk.ids += ids
        talk.positions += [
            (p, p, p) for p in range(talk.next_position, talk.next_position + len(ids))
        ]
        talk.next_position += len(ids)

    def _picture(self, talk: Conversation, image: np.ndarray) -> None:
        self._ids(talk, [self.vision_start])
        talk.pictures.append(patches(image))
        talk.starts.append(len(talk.ids))
        side, first = GRID // MERGE, talk.next_position
        talk.ids += [self.image] * TOKENS
        talk.positions += [(first, first + y, first + x) for y in range(side) for x in range(side)]
        talk.next_position = first + side
        self._ids(talk, [self.vision_end])

    def conversation(
        self, rng: random.Random, shelf: Shelf, questions: list[Question]
    ) -> Conversation:
        """The shelf's pages in random order, then the questions and answers, turn by turn."""
        talk = Conversation()
        self._text(talk, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        for page in rng.sample(shelf.pages, len(shelf.pages)):
            for chunk in page.chunks:
                for part in chunk:
                    if isinstance(part, str):
                        self._text(talk, part)
                    else:
                        self._picture(talk, np.asarray(part))
                self._text(talk, "\n")
        for turn, question in enumerate(questions):
            if turn:
                self._text(talk, "\n<|im_start|>user\n")
            self._text(talk, question.text)
            self._text(talk, "<|im_end|>\n<|im_start|>assistant\n")
            first = len(talk.ids)
            self._text(talk, question.answer)
            self._text(talk, "<|im_end|>")
            talk.answers.append((first, len(talk.ids), label(question)))
        return talk

    def recall(self, rng: random.Random, vocabulary: list[str]) -> Conversation:
        """Random pairs of words in short sentences; asked for one, the answer is the other."""
        talk = Conversation()
        self._text(talk, "<|im_start|>user\n")
        count = rng.randint(2, 5)
        values = rng.sample(vocabulary, count)
        others = [w for w in vocabulary if w not in values]
        keys = rng.sample(words.STATIONS if rng.random() < 0.5 else others, count)
        facts = [rng.choice(("keeper", "goods")) for _ in keys]
        sentences = []
        for key, value, fact in zip(keys, values, facts, strict=True):
            if rng.random() < 0.4:
                gap = [rng.choice(FILLERS) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
                sentences.append(" ".join([key, *gap, value]) + ".")
            else:
                template = rng.choice(words.NAMED[(fact,)])
                sentences.append(template.format(**{"s": key, fact: value}))
        for sentence in sentences:
            self._text(talk, sentence)
            self._text(talk, "\n")
        turns = list(zip(keys, values, facts, strict=True))
        for turn, (key, value, fact) in enumerate(rng.sample(turns, count)):
            asked = rng.choice(words.LOOKUPS[fact]).format(s=key)
            self._text(talk, ("\n<|im_start|>user\n" if turn else "") + asked)
            self._text(talk, "<|im_end|>\n<|im_start|>assistant\n")
            begin = len(talk.ids)
            self._text(talk, f"{key} {value}")
            self._text(talk, "<|im_end|>")
            talk.answers.append((begin, len(talk.ids), f"recall_{count}"))
        return talk


def label(question: Question) -> str:
    """The kind, with numbers read from pictures apart: they are learned last."""
    number = question.kind == "picture_lookup" and "number" in question.text
    return "picture_number" if number else question.kind


@dataclass
class Batch:
    """Conversations padded on the right; targets are predicted from the token before them."""

    ids: torch.Tensor  # [batch, length]
    positions: torch.Tensor  # [3, batch, length]
    pixels: torch.Tensor  # [pictures, 144, 588]
    picture_places: torch.Tensor  # flat indexes of the picture tokens
    target_places: torch.Tensor  # flat indexes of the answers' tokens
    answers: list[tuple[int, int, str]]  # spans within target_places
    context_places: torch.Tensor  # flat indexes of all other text
    size: int = 0  # stations in each context


def collate(talks: list[Conversation], pad: int) -> Batch:
    """One batch of conversations."""
    length = max(len(t.ids) for t in talks)
    ids = np.full((len(talks), length), pad, dtype=np.int64)
    positions = np.zeros((3, len(talks), length), dtype=np.int64)
    pictures, places, targets, answers = [], [], [], []
    count = 0
    context = []
    for row, talk in enumerate(talks):
        ids[row, : len(talk.ids)] = talk.ids
        positions[:, row, : len(talk.ids)] = np.array(talk.positions).T
        pictures += talk.pictures
        places += [row * length + s + np.arange(TOKENS) for s in talk.starts]
        text = np.ones(len(talk.ids), dtype=bool)
        text[0] = False
        for start in talk.starts:
            text[start - 1 : start + TOKENS + 1] = False
        for first, end, _ in talk.answers:
            text[first:end] = False
        context.append(row * length + np.flatnonzero(text))
        for first, end, kind in talk.answers:
            targets.append(row * length + np.arange(first, end))
            answers.append((count, count + end - first, kind))
            count += end - first
    shape = (len(pictures), GRID * GRID, 3 * PATCH * PATCH)
    pixels = np.stack(pictures).reshape(shape) if pictures else np.zeros((0, 1, 1), np.float32)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(pixels),
        torch.from_numpy(np.concatenate(places) if places else np.zeros(0, np.int64)),
        torch.from_numpy(np.concatenate(targets)),
        answers,
        torch.from_numpy(np.concatenate(context)),
    )
