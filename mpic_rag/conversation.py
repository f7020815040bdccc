"""One request: retrieved chunks and a question in, tokens and a report out."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpic_rag.cache import LinkedCache
from mpic_rag.compiler import compute
from mpic_rag.documents import Chunk, Content, Part
from mpic_rag.linker import Piece, link, place, prefill
from mpic_rag.loading import LoadError
from mpic_rag.report import Report, Stopwatch
from mpic_rag.retrieval import Retrieval
from mpic_rag.sampling import Sampler, Sampling
from mpic_rag.selection import Selector
from mpic_rag.tokens import Detokenizer

if TYPE_CHECKING:
    from mpic_rag.engine import Engine

GREEDY = Sampling()
SHORT = 64  # tokens
Ids = tuple[int, ...]  # of the chat template, or of an answer
Item = Part | Chunk | Ids


@dataclass(frozen=True)
class Answer:
    """A finished answer; `ids` are its tokens without the one that ended it."""

    text: str
    ids: tuple[int, ...]
    report: Report


class Turn(NamedTuple):
    """An exchange that took place already."""

    user: Content
    answer: str


class Conversation:
    """Turns over one growing cache: what an earlier turn computed is never computed again.

    `system` and the earlier `turns` may hold chunks, which are linked like any others.
    """

    def __init__(
        self, engine: Engine, system: str | Content | None = None, turns: Sequence[Turn] = ()
    ) -> None:
        self.engine = engine
        self.system = system
        text = "..." if system and not isinstance(system, str) else system
        self.template = engine.model.codec.template(text if isinstance(text, str) else None)
        self.turns = tuple(turns)
        self.cache: LinkedCache | None = None
        self.position = 0
        self.answer: list[int] = []
        self._unseen: list[int] = []  # the answer's tokens that are not in the cache yet
        self._busy = False

    def ask(self, question: str | Content, chunks: Sequence[Chunk] = (), **kwargs: Any) -> Answer:
        """Answer in one go; takes what `stream` takes."""
        stream = self.stream(question, chunks, **kwargs)
        text = "".join(stream)
        return Answer(text, tuple(self.answer), stream.report)

    def stream(
        self,
        question: str | Content,
        chunks: Sequence[Chunk] = (),
        *,
        selector: str | None = None,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
    ) -> Stream:
        """Answer piece by piece: iterate for text; `report` fills in as it runs.

        `question` is a text, or texts, pictures and chunks in order, behind `chunks`. Raises
        `ValueError` where the question is empty, a picture is broken, or the prompt is longer than
        the model's context.
        """
        parts = (question,) if isinstance(question, str) else tuple(question)
        if not any(not isinstance(part, str) or part.strip() for part in parts):
            raise ValueError("the question is empty")
        if max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        rule = Selector.parse(selector or self.engine.selector)
        if self.engine.fault and rule.reuses:
            rule = Selector.parse("full")
        return Stream(self, (*chunks, *parts), rule, max_tokens, sampling)

    def score(
        self,
        question: str | Content,
        chunks: Sequence[Chunk],
        answer: Sequence[int],
        selector: str | None = None,
    ) -> tuple[torch.Tensor, Report]:
        """Log-probabilities [answer, vocabulary] at each token of a given answer, in one pass.

        Row n is what the model says behind the prompt and the answer's first n tokens. Raises what
        `stream` raises.
        """
        if not answer:
            raise ValueError("the answer to score is empty")
        stream = self.stream(question, chunks, selector=selector, max_tokens=len(answer))
        with self._prefilled(stream) as (watch, hidden):
            watch.token()
            model = self.engine.model
            self.answer = list(answer)
            with model.lock, torch.inference_mode():
                if len(answer) > 1:
                    self._unseen = list(answer[:-1])
                    hidden = torch.cat([hidden, self._extend()])
                self._unseen = [answer[-1]]
                return model.logits(hidden).log_softmax(-1), stream.report

    def _items(self, content: Content) -> list[Item]:
        """All that stands behind the opening and isn't in the cache, in order."""
        items: list[Item] = []
        if self.cache is None:
            if self.system and not isinstance(self.system, str):
                items += [*self.system, self.template.closing]
            encode, template = self.engine.model.codec.encode, self.template
            for turn in self.turns:
                items += [*turn.user, template.suffix, tuple(encode(turn.answer)), template.between]
        return [*items, *content, self.template.suffix]

    def _turn(self, stream: Stream) -> Generator[str, None, None]:
        with self._prefilled(stream) as (watch, hidden):
            yield from self._decode(stream, watch, hidden)

    @contextmanager
    def _prefilled(self, stream: Stream) -> Iterator[tuple[Stopwatch, torch.Tensor]]:
        """All that comes before a turn's first token, and what comes behind its last."""
        if self._busy:
            raise RuntimeError("the last answer of this conversation is still being streamed")
        self._busy = True
        engine, model = self.engine, self.engine.model
        watch = Stopwatch(stream.report, model.device)
        items = self._items(stream.content)
        retrieval = Retrieval(engine, [i for i in items if isinstance(i, Chunk)], stream.rule)
        try:
            # Without the lock: others may decode while this one waits for a disk or a network.
            with watch.stage("lookup"):
                retrieval.find()
            with watch.stage("load"):
                retrieval.load()
            try:
                with model.lock, torch.inference_mode():
                    hidden = self._prefill(stream, watch, retrieval, items)
            except BaseException:
                retrieval.abandon()
                raise
            try:
                yield watch, hidden
            finally:
                retrieval.settle()
        finally:
            self._busy = False

    def _decode(
        self, stream: Stream, watch: Stopwatch, hidden: torch.Tensor
    ) -> Generator[str, None, None]:
        """Choose tokens, the first one from `hidden` [1, hidden], until one ends the answer."""
        model = self.engine.model
        sampler, detokenizer = Sampler(stream.sampling), Detokenizer(model.codec)
        self.answer = []
        for n in range(stream.max_tokens):
            with model.lock, torch.inference_mode():
                if n:
                    hidden = self._extend()
                token = sampler(model.logits(hidden))
            watch.token()
            if token in model.stop_ids:
                break
            self.answer.append(token)
            self._unseen.append(token)
            if text := detokenizer.step(token):
                yield text
            watch.resume()
        if text := detokenizer.flush():
            yield text

    def _prefill(
        self, stream: Stream, watch: Stopwatch, retrieval: Retrieval, items: Sequence[Item]
    ) -> torch.Tensor:
        """Render, link, select and prefill one turn; returns the last hidden state."""
        start, position, opening = self._opening(retrieval)
        with watch.stage("render"):
            fresh = _fresh([item for item in (opening, *items) if item])
            rendered = iter(self.engine.model.segments([run for run in fresh if run], end=""))
        others = [Piece(next(rendered)) if run else None for run in fresh]
        while True:
            with watch.stage("render"):
                retrieval.render()
            linked = iter(retrieval.pieces)
            pieces = [piece or next(linked) for piece in others]
            try:
                return self._pass(
                    stream, watch, retrieval, start, position, [p for p in pieces if p]
                )
            except LoadError as error:  # costs the time so far, never the answer
                retrieval.lose(error)

    def _pass(
        self,
        stream: Stream,
        watch: Stopwatch,
        retrieval: Retrieval,
        start: LinkedCache,
        position: int,
        pieces: list[Piece],
    ) -> torch.Tensor:
        """Link the pieces behind `start` and compute what must be computed."""
        model, report, rule = self.engine.model, stream.report, stream.rule
        base = start.length
        total = base + sum(len(piece.segment) for piece in pieces)
        if total + stream.max_tokens > model.max_tokens:
            raise ValueError(
                f"the prompt has {total} tokens and the answer may have {stream.max_tokens} more;"
                f" the model holds {model.max_tokens}: retrieve fewer chunks"
            )
        cache = start
        try:
            with watch.stage("link"):
                if start is not self.cache or start.capacity < total + stream.max_tokens:
                    cache = start.grown(total + stream.max_tokens)
                pieces, position = place(pieces, base, position)
                link(model, cache, pieces)
            with watch.stage("select"):
                rows, work = rule.choose(model, cache, pieces)
            with watch.stage("prefill"):
                hidden = prefill(model, cache, pieces, rows)[-1:]
        except BaseException:
            cache.truncate(base)
            raise
        ours = {id(piece.segment) for piece in retrieval.pieces if piece}
        retrieval.describe(
            report,
            [
                (piece.slot, int(row.sum()))
                for piece, row in zip(pieces, rows, strict=True)
                if id(piece.segment) in ours
            ],
        )
        report.cached_tokens = base
        report.scored = work / model.work(torch.arange(total))
        report.fresh_tokens = total - base - report.chunk_tokens
        if not retrieval.loadings:
            computed = torch.cat([p.slots[row] for p, row in zip(pieces, rows, strict=True)])
            seconds = report.seconds["prefill"] + report.seconds["render"]
            costs = self.engine.store.costs
            costs.measure_prefill(self.engine.identity, model.work(computed), seconds)
        self.cache, self.position, self._unseen = cache, position, []
        return hidden

    def _opening(self, retrieval: Retrieval) -> tuple[LinkedCache, int, tuple[int, ...]]:
        """What the turn stands on: a cache, the position behind it, the tokens that come first."""
        if self.cache is not None:
            return self.cache, self.position, (*self._unseen, *self.template.between)
        if self.system and not isinstance(self.system, str):
            return *compute(self.engine.model, []), self.template.opening
        # All new: plainly causal attention is worth a short system prompt's computing, since it
        # takes half as long as attention under a mask.
        new = retrieval.chunks and not any(p and p.reused for p in retrieval.pieces)
        if not retrieval.rule.reuses or (new and len(self.template.prefix) <= SHORT):
            return *compute(self.engine.model, []), self.template.prefix
        text = self.system if isinstance(self.system, str) else None
        return *self.engine.start(text), ()

    def _extend(self) -> torch.Tensor:
        """Run the answer's newest tokens through the model; returns hidden states [new, hidden]."""
        assert self.cache is not None
        model, cache, base = self.engine.model, self.cache, self.cache.length
        placed, after = place([Piece(model.text_segment(self._unseen))], base, self.position)
        try:
            link(model, cache, placed)
            rows = torch.ones(len(self._unseen), dtype=torch.bool)
            hidden = prefill(model, cache, placed, [rows])
        except BaseException:  # an interrupt too: the conversation must stay usable
            cache.truncate(base)
            raise
        self.position, self._unseen = after, []
        return hidden


def _fresh(items: Sequence[Item]) -> list[tuple[Part | Ids, ...]]:
    """Join what stands between chunks; an empty run stands for each chunk."""
    runs: list[tuple[Part | Ids, ...]] = []
    for linked, group in groupby(items, lambda item: isinstance(item, Chunk)):
        run = tuple(group)
        runs += [()] * len(run) if linked else [tuple(i for i in run if not isinstance(i, Chunk))]
    return runs


class Stream:
    """An answer in the making: iterate over it for pieces of text."""

    def __init__(
        self,
        conversation: Conversation,
        content: tuple[Part | Chunk, ...],
        rule: Selector,
        max_tokens: int,
        sampling: Sampling,
    ) -> None:
        self.content, self.rule = content, rule
        self.max_tokens, self.sampling = max_tokens, sampling
        self.report = Report(rule.name)
        self._text = conversation._turn(self)

    def __iter__(self) -> Iterator[str]:
        return self._text

    def close(self) -> None:
        """Stop here; the conversation goes on from what was said."""
        self._text.close()
