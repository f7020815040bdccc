"""Token layout of a shelf and of questions about it: ids, M-RoPE positions, pictures, answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from mpic_rag.data.words import COLOURS, COMPARISONS, GOODS, KEEPERS, SHAPES, STATIONS, SYSTEM
from mpic_rag.data.world import Question, Shelf

GRID = 12  # patches a side of a 168 x 168 picture
PATCH, MERGE = 14, 2
TOKENS = (GRID // MERGE) ** 2
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)
DRILLS = 4  # comparisons of given numbers behind each context
NOTHING = -1  # the topic of a token that is about no station yet


def patches(image: np.ndarray) -> np.ndarray:
    """A picture as the image processor cuts it, without the doubled time axis: [144, 3, 14, 14]."""
    pixels = (image.astype(np.float32) / 255 - MEAN) / STD
    side = GRID // MERGE
    grid = pixels.transpose(2, 0, 1).reshape(3, side, MERGE, PATCH, side, MERGE, PATCH)
    return grid.transpose(1, 4, 2, 5, 0, 3, 6).reshape(GRID * GRID, 3, PATCH, PATCH)


@dataclass
class Strand:
    """Tokens in a row; `answers` holds (first, end, kind) spans."""

    position: int  # of the next token
    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    topics: list[int] = field(default_factory=list)  # the station's name that a token is about
    pictures: list[np.ndarray] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # first token of each picture
    answers: list[tuple[int, int, str]] = field(default_factory=list)
    clues: list[tuple[int, int]] = field(default_factory=list)  # what an answer starts from
    # Where an answer stands: (place in the answer, station's name, word to look for, is a clue)
    sources: list[tuple[int, int, int, bool]] = field(default_factory=list)

    def text(self, ids: list[int], topic: int = NOTHING) -> None:
        """Appends text."""
        self.ids += ids
        self.positions += [(p, p, p) for p in range(self.position, self.position + len(ids))]
        self.topics += [topic] * len(ids)
        self.position += len(ids)

    def picture(self, image: np.ndarray, token: int, topic: int) -> None:
        """Appends a picture's tokens."""
        self.pictures.append(patches(image))
        self.starts.append(len(self.ids))
        side, first = GRID // MERGE, self.position
        self.ids += [token] * TOKENS
        self.positions += [(first, first + y, first + x) for y in range(side) for x in range(side)]
        self.topics += [topic] * TOKENS
        self.position = first + side


@dataclass
class Talk:
    """A context, and conversations that each go on from it without seeing one another."""

    context: Strand
    branches: list[Strand]

    def __len__(self) -> int:
        return len(self.context.ids) + sum(len(b.ids) for b in self.branches)


class Layout:
    """Tokenises each piece on its own and joins the ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.encode = cache(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.pad, self.vision_start, self.vision_end, self.image = (
            tokenizer.convert_tokens_to_ids(t)
            for t in ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
        )
        self.colon = self._token(":")
        self.names = {self.encode(s)[0] for s in STATIONS}
        values = [*KEEPERS, *GOODS, *COLOURS, *SHAPES]
        self.digits = set(map(self._token, "0123456789"))
        self.spellings = {t: t for t in self.digits}
        for word in (*values, *STATIONS):
            self.spellings |= {self._token(s + word): self._token(word) for s in ("", " ")}

    def _token(self, word: str) -> int:
        return self.encode(word)[0]

    def _context(self, rng: random.Random, shelf: Shelf) -> Strand:
        strand = Strand(0)
        strand.text(self.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"))
        for page in rng.sample(shelf.pages, len(shelf.pages)):
            topic, name = NOTHING, self._token(page.name)
            for chunk in page.chunks:
                for part in chunk:
                    if not isinstance(part, str):
                        strand.text([self.vision_start], topic)
                        strand.picture(np.asarray(part), self.image, topic)
                        strand.text([self.vision_end], topic)
                        continue
                    for token in self.encode(part):
                        topic = name if self.spellings.get(token) == name else topic
                        strand.text([token], topic)
                strand.text(self.encode("\n"))
        return strand

    def _branch(self, position: int, questions: list[Question]) -> Strand:
        strand = Strand(position)
        for turn, question in enumerate(questions):
            if turn:
                strand.text(self.encode("\n<|im_start|>user\n"))
            asked = len(strand.ids)
            strand.text(self.encode(question.text))
            strand.text(self.encode("<|im_end|>\n<|im_start|>assistant\n"))
            first = len(strand.ids)
            strand.text(self.encode(question.answer))
            strand.text(self.encode("<|im_end|>"))
            strand.answers.append((first, len(strand.ids), label(question)))
            self._add_sources(strand, asked, first)
        return strand

    def _add_sources(self, strand: Strand, asked: int, first: int) -> None:
        """The name in an answer stands where the question's clue does, a value by its name."""
        values = [self.spellings[t] for t in strand.ids[asked:first] if t in self.spellings]
        strand.clues += [(first - 1, v) for v in values]
        answer = [self.spellings.get(t) for t in strand.ids]
        name, topic = next(
            (i, t) for i, t in enumerate(answer) if i >= first and t is not None and t in self.names
        )
        if name > first:
            strand.sources.append((name, topic, values[0], True))
        for place in range(name + 1, len(answer)):
            token = answer[place]
            if token is None or strand.ids[place - 1] == self.colon:
                continue
            topic = token if token in self.names else topic
            if token in self.digits:
                token = token if self._year(strand.ids, place) else self.image
            strand.sources.append((place, topic, token, False))

    def _year(self, ids: list[int], place: int) -> bool:
        """Whether a digit is one of more than two in a row: signs show two."""
        digits = "".join("d" if t in self.digits else " " for t in ids[place - 2 : place + 3])
        return "ddd" in digits

    def _drill(self, rng: random.Random, position: int) -> Strand:
        """A comparison that is all but answered: the numbers are in the answer."""
        strand = Strand(position)
        a, b = rng.sample(STATIONS, 2)
        first = rng.randint(10, 99)
        second = first // 10 * 10 + rng.randint(0, 9) if rng.random() < 0.4 else rng.randint(10, 99)
        second += first == second and (1 if first < 99 else -1)
        strand.text(self.encode(rng.choice(COMPARISONS).format(a=a, b=b)))
        strand.text(self.encode("<|im_end|>\n<|im_start|>assistant\n"))
        winner = a if first > second else b
        strand.text(self.encode(f"{a} {first}, {b} {second}: {winner}"))
        strand.answers.append((len(strand.ids) - 1, len(strand.ids), "compare"))
        return strand

    def talk(self, rng: random.Random, shelf: Shelf, questions: list[Question]) -> Talk:
        """The shelf's pages in random order; a few conversations have two turns."""
        context, branches, left = self._context(rng, shelf), [], list(questions)
        while left:
            turns = 2 if rng.random() < 0.1 else 1
            branches.append(self._branch(context.position, left[:turns]))
            left = left[turns:]
        branches += [self._drill(rng, context.position) for _ in range(DRILLS)]
        return Talk(context, branches)


def label(question: Question) -> str:
    """The kind, with what is read from digits apart: it is learned last."""
    if question.kind.endswith("_lookup") and question.answer[-1].isdigit():
        return question.kind.replace("lookup", "number")
    return question.kind


@dataclass
class Batch:
    """Contexts padded on the right, then each one's branches, padded too.

    Targets are predicted from the token before them.
    """

    ids: torch.Tensor  # [batch, context + branches]
    positions: torch.Tensor  # [3, batch, context + branches]
    context: int  # length of the padded contexts
    mask: torch.Tensor  # [batch, 1, branches, context + branches], true where a branch may look
    pixels: torch.Tensor  # [pictures, 144, 588]
    picture_places: torch.Tensor  # flat indexes of the picture tokens
    target_places: torch.Tensor  # flat indexes of the answers' tokens
    answers: list[tuple[int, int, str]]  # spans within target_places
    topic_places: torch.Tensor  # flat indexes of the tokens that are about a station
    topics: torch.Tensor  # the names of those stations
    clue_places: torch.Tensor  # flat indexes of the tokens before the answers, each as often
    clues: torch.Tensor  # as its question names something that tells which station is meant
    # Which hop it is, row and branch column that looks there
    source_places: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sources: torch.Tensor  # [those, context], true where what comes next is told
    level: int = 0


def collate(talks: list[Talk], layout: Layout) -> Batch:
    """One batch of talks."""
    pad = layout.pad
    context = max(len(t.context.ids) for t in talks)
    length = context + max(sum(len(b.ids) for b in t.branches) for t in talks)
    ids = np.full((len(talks), length), pad, dtype=np.int64)
    positions = np.zeros((3, len(talks), length), dtype=np.int64)
    topics = np.full((len(talks), length), NOTHING, dtype=np.int64)
    owner = np.full((len(talks), length), -1, dtype=np.int64)  # the branch; 0 is the context
    pictures, places, targets, answers, clues = [], [], [], [], []
    count = 0
    for row, talk in enumerate(talks):
        for branch, start, strand in _strands(talk, context):
            end = start + len(strand.ids)
            ids[row, start:end], topics[row, start:end] = strand.ids, strand.topics
            positions[:, row, start:end] = np.array(strand.positions).T
            owner[row, start:end] = branch
            pictures += strand.pictures
            places += [row * length + start + s + np.arange(TOKENS) for s in strand.starts]
            clues += [(row * length + start + place, clue) for place, clue in strand.clues]
            for first, last, kind in strand.answers:
                targets.append(row * length + start + np.arange(first, last))
                answers.append((count, count + last - first, kind))
                count += last - first
    asking, seen = owner[:, context:, None], owner[:, None, :]
    order = np.arange(length)
    causal = order[context:, None] >= order
    mask = ((seen == 0) | (seen == asking)) & causal
    shape = (len(pictures), GRID * GRID, 3 * PATCH * PATCH)
    pixels = np.stack(pictures).reshape(shape) if pictures else np.zeros((0, 1, 1), np.float32)
    hops, rows, columns, sources = _sources(talks, layout, context)
    clue_places, clue_tokens = torch.tensor(clues).T
    about = np.flatnonzero(topics.ravel() != NOTHING)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        context,
        torch.from_numpy(mask[:, None]),
        torch.from_numpy(pixels),
        torch.from_numpy(np.concatenate(places) if places else np.zeros(0, np.int64)),
        torch.from_numpy(np.concatenate(targets)),
        answers,
        torch.from_numpy(about),
        torch.from_numpy(topics.ravel()[about]),
        clue_places,
        clue_tokens,
        (torch.tensor(hops), torch.tensor(rows), torch.tensor(columns)),
        torch.from_numpy(np.stack(sources)),
    )


def _sources(
    talks: list[Talk], layout: Layout, context: int
) -> tuple[list[int], list[int], list[int], list[np.ndarray]]:
    """Where each value in an answer stands: the word itself, or the station's picture."""
    hops, rows, columns, sources = [], [], [], []
    for row, talk in enumerate(talks):
        strand = talk.context
        bare = np.array([layout.spellings.get(t, t) for t in strand.ids])
        topics = np.array(strand.topics)
        start = 0
        for branch in talk.branches:
            for place, topic, token, is_clue in branch.sources:
                about = topics == topic
                told = about & (bare == token)
                if token == topic:  # a name comes from anything about the station
                    told = about
                elif not told.any():
                    told = about & (bare == layout.image)
                hops.append(0 if is_clue else 1)
                rows.append(row)
                columns.append(start + place - 1)
                sources.append(np.pad(told, (0, context - len(told))))
            start += len(branch.ids)
    return hops, rows, columns, sources


def _strands(talk: Talk, context: int) -> Iterator[tuple[int, int, Strand]]:
    """The context and the branches as (number, first column, strand)."""
    yield 0, 0, talk.context
    start = context
    for number, branch in enumerate(talk.branches, 1):
        yield number, start, branch
        start += len(branch.ids)
