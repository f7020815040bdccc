"""One request: retrieved chunks and a question in, tokens and a report out."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpic_rag.cache import LinkedCache
from mpic_rag.compiler import compute
from mpic_rag.documents import Chunk, Part
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


@dataclass(frozen=True)
class Answer:
    """A finished answer; `ids` are its tokens without the one that ended it."""

    text: str
    ids: tuple[int, ...]
    report: Report


class Conversation:
    """Turns over one growing cache: what an earlier turn computed is never computed again."""

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.system = system
        self.template = engine.model.codec.template(system)
        self.cache: LinkedCache | None = None
        self.position = 0
        self.answer: list[int] = []
        self._unseen: list[int] = []  # the answer's tokens that are not in the cache yet
        self._busy = False

    def ask(
        self, question: str | Sequence[Part], chunks: Sequence[Chunk] = (), **kwargs: Any
    ) -> Answer:
        """Answer in one go; takes what `stream` takes."""
        stream = self.stream(question, chunks, **kwargs)
        text = "".join(stream)
        return Answer(text, tuple(self.answer), stream.report)

    def stream(
        self,
        question: str | Sequence[Part],
        chunks: Sequence[Chunk] = (),
        *,
        selector: str | None = None,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
    ) -> Stream:
        """Answer piece by piece: iterate for text; `report` fills in as it runs.

        `question` is a text, or texts and pictures in order. Raises `ValueError` where the
        question is empty, a picture is broken, or the prompt is longer than the model's context.
        """
        parts = (question,) if isinstance(question, str) else tuple(question)
        if not any(not isinstance(part, str) or part.strip() for part in parts):
            raise ValueError("the question is empty")
        if max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        rule = Selector.parse(selector or self.engine.selector)
        return Stream(self, parts, chunks, rule, max_tokens, sampling)

    def _turn(self, stream: Stream) -> Generator[str, None, None]:
        if self._busy:
            raise RuntimeError("the last answer of this conversation is still being streamed")
        self._busy = True
        engine, model = self.engine, self.engine.model
        watch = Stopwatch(stream.report, model.device)
        retrieval = Retrieval(engine, stream.chunks, stream.rule)
        try:
            # Without the lock: others may decode while this one waits for a disk or a network.
            with watch.stage("lookup"):
                retrieval.find()
            with watch.stage("load"):
                retrieval.load()
            try:
                with model.lock, torch.inference_mode():
                    hidden = self._prefill(stream, watch, retrieval)
            except BaseException:
                retrieval.abandon()
                raise
            try:
                yield from self._decode(stream, watch, hidden)
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
                    hidden = self._step()
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

    def _prefill(self, stream: Stream, watch: Stopwatch, retrieval: Retrieval) -> torch.Tensor:
        """Render, link, select and prefill one turn; returns the last hidden state."""
        model = self.engine.model
        start, position, opening = self._opening(retrieval)
        with watch.stage("render"):
            question = model.segments([stream.question], end="")[0]
            before, after = (model.text_segment(ids) for ids in (opening, self.template.suffix))
        while True:
            with watch.stage("render"):
                retrieval.render()
            chunks = [piece for piece in retrieval.pieces if piece]
            pieces = [Piece(before), *chunks, Piece(question), Piece(after)]
            try:
                return self._pass(stream, watch, retrieval, start, position, pieces)
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
                rows = [
                    rule.rows(piece.segment)
                    if piece.reused
                    else torch.ones(len(piece.segment)).bool()
                    for piece in pieces
                ]
            with watch.stage("prefill"):
                hidden = prefill(model, cache, pieces, rows)
        except BaseException:
            cache.truncate(base)
            raise
        retrieval.describe(report, [int(row.sum()) for row in rows[1:-2]])
        report.cached_tokens = base
        report.fresh_tokens = total - base - report.chunk_tokens
        if not retrieval.loadings:
            computed = sum(int(row.sum()) for row in rows)
            seconds = report.seconds["prefill"] + report.seconds["render"]
            self.engine.store.costs.measure_prefill(self.engine.identity, computed, seconds)
        self.cache, self.position, self._unseen = cache, position, []
        return hidden

    def _opening(self, retrieval: Retrieval) -> tuple[LinkedCache, int, Sequence[int]]:
        """What the turn stands on: a cache, the position behind it, the tokens that come first."""
        if self.cache is not None:
            return self.cache, self.position, [*self._unseen, *self.template.between]
        # All new: plainly causal attention is worth a short system prompt's computing, since it
        # takes half as long as attention under a mask.
        new = retrieval.chunks and not any(p and p.reused for p in retrieval.pieces)
        if not retrieval.rule.reuses or (new and len(self.template.prefix) <= SHORT):
            return *compute(self.engine.model, []), self.template.prefix
        return *self.engine.start(self.system), ()

    def _step(self) -> torch.Tensor:
        """Run the newest token through the model; returns its hidden state [1, hidden]."""
        assert self.cache is not None
        model, cache, base = self.engine.model, self.cache, self.cache.length
        placed, after = place([Piece(model.text_segment(self._unseen))], base, self.position)
        try:
            link(model, cache, placed)
            hidden = prefill(model, cache, placed, [torch.ones(1, dtype=torch.bool)])
        except BaseException:  # an interrupt too: the conversation must stay usable
            cache.truncate(base)
            raise
        self.position, self._unseen = after, []
        return hidden


class Stream:
    """An answer in the making: iterate over it for pieces of text."""

    def __init__(
        self,
        conversation: Conversation,
        question: tuple[Part, ...],
        chunks: Sequence[Chunk],
        rule: Selector,
        max_tokens: int,
        sampling: Sampling,
    ) -> None:
        self.question, self.chunks, self.rule = question, tuple(chunks), rule
        self.max_tokens, self.sampling = max_tokens, sampling
        self.report = Report(rule.name)
        self._text = conversation._turn(self)

    def __iter__(self) -> Iterator[str]:
        return self._text

    def close(self) -> None:
        """Stop here; the conversation goes on from what was said."""
        self._text.close()
