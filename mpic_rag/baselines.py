"""Exact prefix reuse: the last prompt's cache serves what the next one has in common with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from transformers import DynamicCache

from mpic_rag.conversation import Answer
from mpic_rag.documents import Chunk, Picture
from mpic_rag.linker import Piece, place
from mpic_rag.model import Model
from mpic_rag.report import ChunkReport, Report, Stopwatch
from mpic_rag.segment import Segment


class PrefixReuse:
    """Keeps the last prompt's cache and reuses its longest common prefix with the next one.

    Pictures that stand in that prefix don't go through the vision tower again.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.template = model.codec.template()
        self.cache = DynamicCache()
        self.signature: list[object] = []
        self.segments: list[tuple[str, Segment]] = []

    def ask(self, question: str, chunks: Sequence[Chunk], max_tokens: int = 256) -> Answer:
        """Answer greedily; the report counts the tokens behind the common prefix as recomputed."""
        with self.model.lock, torch.inference_mode():
            return self._ask(question, chunks, max_tokens)

    def _ask(self, question: str, chunks: Sequence[Chunk], max_tokens: int) -> Answer:
        model, report = self.model, Report("prefix")
        watch = Stopwatch(report, model.device)
        with watch.stage("render"):
            segments = self._segments(chunks)
            placed, position = place([Piece(segment) for segment in segments], 0, 0)
            tail = [*model.codec.encode(question), *self.template.suffix]
            placed += place([Piece(model.text_segment(tail))], sum(map(len, segments)), position)[0]
        with watch.stage("lookup"):
            signature = self._sign(placed, chunks)
            pairs = zip(signature, self.signature, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            same = min(same, len(signature) - 1)  # the last token is always computed
            self.cache.crop(-(self.cache.get_seq_length() - same))
        with watch.stage("prefill"):
            new = [torch.arange(len(p.segment))[max(0, same - p.slot) :] for p in placed]
            chosen = [(p, rows) for p, rows in zip(placed, new, strict=True) if len(rows)]
            hidden = self._forward(
                torch.cat([model.embed(p.segment, rows) for p, rows in chosen]),
                torch.cat([p.positions[:, rows] for p, rows in chosen], dim=1),
                torch.arange(same, len(signature)) if 0 < same < len(signature) - 1 else None,
            )
        report.cached_tokens = min(same, len(segments[0]))
        report.fresh_tokens = len(new[0]) + len(new[-1])
        report.chunks = [
            ChunkReport(chunk.source, len(p.segment), len(rows))
            for chunk, p, rows in zip(chunks, placed[1:], new[1:], strict=False)
        ]
        ids: list[int] = []
        after = int(placed[-1].positions.max()) + 1
        while len(ids) < max_tokens:
            token = int(model.logits(hidden[-1:]).argmax())
            watch.token()
            if token in model.stop_ids:
                break
            ids.append(token)
            step = model.text_segment([token])
            hidden = self._forward(model.embed(step, torch.tensor([0])), step.positions + after)
            after += 1
        self.cache.crop(-(self.cache.get_seq_length() - len(signature)))
        self.signature = signature
        return Answer(model.codec.tokenizer.backend_tokenizer.decode(ids), tuple(ids), report)

    def _forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.model.forward(embeds, positions, self.cache, slots)

    def _segments(self, chunks: Sequence[Chunk]) -> list[Segment]:
        """Prefix and chunks; those that head the last prompt too come with their features."""
        pairs = zip(chunks, self.segments, strict=False)
        same = takewhile(lambda pair: pair[0].digest == pair[1][0], pairs)
        kept = [old for _, old in same]
        rest = chunks[len(kept) :]
        new = self.model.segments([chunk.parts for chunk in rest])
        self.segments = [*kept, *zip((chunk.digest for chunk in rest), new, strict=True)]
        return [self.model.text_segment(self.template.prefix), *(s for _, s in self.segments)]

    def _sign(self, placed: Sequence[Piece], chunks: Sequence[Chunk]) -> list[object]:
        """Per token its id, or for an image token its picture and row, to compare prompts by."""
        signature: list[object] = list(placed[0].segment.ids.tolist())
        for piece, chunk in zip(placed[1:], chunks, strict=False):
            pictures = [part.digest for part in chunk.parts if isinstance(part, Picture)]
            segment = piece.segment
            rows = zip(
                segment.ids.tolist(),
                segment.images.tolist(),
                segment.row_order().tolist(),
                strict=True,
            )
            signature += [(pictures[n - 1], row) if n else token for token, n, row in rows]
        return signature + placed[-1].segment.ids.tolist()
