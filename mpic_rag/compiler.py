"""Run documents through the model once and cut their keys and values at the chunk borders."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from mpic_rag.cache import LinkedCache
from mpic_rag.documents import Chunk, Document
from mpic_rag.linker import Piece, link, place, prefill
from mpic_rag.model import Model
from mpic_rag.segment import ChunkKV, Segment
from mpic_rag.store import Library

FORMAT = 2
Mode = Literal["document", "isolated", "bare"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Compiler:
    """Makes and names chunk KVs.

    `document` compiles a chunk behind what its document says before it, `isolated` alone, both
    behind the canonical template prefix and then the warm-up chunks; `bare` without either.
    """

    def __init__(
        self,
        model: Model,
        mode: Mode = "document",
        warmup: Sequence[Chunk] = (),
        int8: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"there is no mode {mode!r}; choose from {', '.join(MODES)}")
        self.model = model
        self.mode = mode
        bare = mode == "bare"
        self.prefix = () if bare else model.codec.template().prefix
        self.warmup = () if bare else tuple(warmup)
        self._identity = {
            "format": FORMAT,
            "model": model.fingerprint,
            "storage": "int8" if int8 else "model",
            "prefix": self.prefix,
            "warmup": [chunk.digest for chunk in self.warmup],
        }
        self._start: tuple[LinkedCache, int] | None = None

    def mode_in(self, library: Library) -> Mode:
        """How chunks are compiled for a library, which may insist on isolation."""
        isolated = self.mode == "document" and library.policy.isolated_only
        return "isolated" if isolated else self.mode

    def key(self, chunk: Chunk, library: Library, mode: Mode | None = None) -> str:
        """The content key of a chunk: all that its KV depends on, and nothing else."""
        return self.key_of(chunk.digest, chunk.context, library, mode)

    def key_of(self, digest: str, context: str, library: Library, mode: Mode | None = None) -> str:
        """The key of a chunk whose content isn't at hand."""
        inside = (mode or self.mode_in(library)) == "document"
        content = {
            **self._identity,
            "library": library.name,
            "context": context if inside else "",
            "chunk": digest,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def put_document(self, document: Document, library: Library) -> int:
        """Compile what a library lacks of a document; returns how many chunks that was."""
        missing = [c for c in document.chunks if not library.contains(self.key(c, library))]
        if not missing:
            return 0
        since, began = library.mark(), time.perf_counter()
        if self.mode_in(library) == "document":
            # Only what stands before the last missing chunk is needed to compile it.
            needed = document.chunks[: document.chunks.index(missing[-1]) + 1]
            compiled = dict(zip(needed, self.compile(needed), strict=True))
        else:
            compiled = {chunk: self.compile([chunk])[0] for chunk in missing}
        work = self.model.work(torch.arange(sum(len(kv.segment) for kv in compiled.values())))
        library.store.costs.measure_prefill(self.cost_name, work, time.perf_counter() - began)
        for chunk in missing:
            self.put(chunk, library, compiled[chunk], since)
        return len(missing)

    def put(
        self,
        chunk: Chunk,
        library: Library,
        kv: ChunkKV,
        since: int,
        mode: Mode | None = None,
    ) -> None:
        """Store a compiled chunk, unless it was deleted after the mark `since`."""
        facts = {
            "model": self.model.fingerprint,
            "mode": mode or self.mode_in(library),
            "prefix": hashlib.sha256(repr(self.prefix).encode()).hexdigest(),
            "source": chunk.source,
        }
        library.put(self.key(chunk, library, mode), kv, chunk.document, facts, since)

    @property
    def cost_name(self) -> str:
        """What measured prefill rates are filed under."""
        return f"{self.model.fingerprint}@{self.model.device.type}"

    @torch.inference_mode()
    def compile(self, chunks: Sequence[Chunk]) -> list[ChunkKV]:
        """Compile chunks in one pass, each behind those before it."""
        segments = self.model.segments([chunk.parts for chunk in chunks])
        start, position = self._context()
        total = start.length + sum(map(len, segments))
        if total > self.model.max_tokens:
            raise ValueError(
                f"{chunks[0].source} and what follows make {total} tokens, the model holds"
                f" {self.model.max_tokens}: split the document, or compile it `isolated`"
            )
        cache = start.grown(total)
        pieces, _ = place([Piece(s) for s in segments], cache.length, position)
        link(self.model, cache, pieces)
        with self.model.captured_keys() as layers:
            prefill(self.model, cache, pieces, [torch.ones(len(s)).bool() for s in segments])
        keys = torch.stack(layers)
        values = torch.stack([layer.values[0] for layer in cache.layers])
        return [
            ChunkKV(
                piece.segment,
                keys[:, :, piece.slot - start.length :][:, :, : len(piece.segment)],
                values[:, :, piece.slot :][:, :, : len(piece.segment)],
            )
            for piece in pieces
        ]

    def _context(self) -> tuple[LinkedCache, int]:
        """Prefix and warm-up, computed once and shared by every pass."""
        if self._start is None:
            segments = [self.model.text_segment(self.prefix)] if self.prefix else []
            segments += self.model.segments([chunk.parts for chunk in self.warmup])
            self._start = compute(self.model, segments)
        return self._start


@torch.inference_mode()
def compute(model: Model, segments: Sequence[Segment]) -> tuple[LinkedCache, int]:
    """Prefill segments from position 0; returns their cache and the position behind them."""
    pieces, position = place([Piece(s) for s in segments], 0, 0)
    total = sum(map(len, segments))
    shape = (model.layers, model.kv_heads, total, model.head_dim)
    cache = LinkedCache.allocate(shape, model.dtype, model.device)
    if total:
        link(model, cache, pieces)
        prefill(model, cache, pieces, [torch.ones(len(s)).bool() for s in segments])
    return cache, position
