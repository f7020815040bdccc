"""Run documents through the model once and cut their keys and values at the chunk borders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from mpic_rag.cache import LinkedCache
from mpic_rag.documents import Chunk, Document
from mpic_rag.linker import Piece, link, place, prefill
from mpic_rag.model import Model
from mpic_rag.segment import ChunkKV, Segment
from mpic_rag.store import Store

FORMAT = 1
Mode = Literal["document", "isolated", "bare"]


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
        library: str = "dynamic",
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"there is no mode {mode!r}; choose from {', '.join(get_args(Mode))}")
        self.model = model
        self.mode = mode
        bare = mode == "bare"
        self.prefix = () if bare else model.codec.template().prefix
        self.warmup = () if bare else tuple(warmup)
        self._identity = {
            "format": FORMAT,
            "model": model.fingerprint,
            "library": library,
            "prefix": self.prefix,
            "warmup": [chunk.digest for chunk in self.warmup],
        }
        self._start: tuple[LinkedCache, int] | None = None

    def key(self, chunk: Chunk, mode: Mode | None = None) -> str:
        """The content key of a chunk: all that its KV depends on, and nothing else."""
        context = chunk.context if (mode or self.mode) == "document" else ""
        content = {**self._identity, "context": context, "chunk": chunk.digest}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def put_document(self, document: Document, store: Store) -> int:
        """Compile what the store lacks of a document; returns how many chunks that was."""
        missing = [c for c in document.chunks if not store.contains(self.key(c))]
        if not missing:
            return 0
        if self.mode == "document":
            # Only what stands before the last missing chunk is needed to compile it.
            needed = document.chunks[: document.chunks.index(missing[-1]) + 1]
            compiled = dict(zip(needed, self.compile(needed), strict=True))
        else:
            compiled = {chunk: self.compile([chunk])[0] for chunk in missing}
        for chunk in missing:
            put(store, self.key(chunk), compiled[chunk])
        return len(missing)

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


def put(store: Store, key: str, kv: ChunkKV) -> None:
    """Write a chunk KV, layer-major, under its content key."""
    segment = kv.segment
    store.put(
        key,
        {
            "ids": segment.ids,
            "positions": segment.positions,
            "images": segment.images,
            "features": segment.features,
            "keys": kv.keys,
            "values": kv.values,
        },
    )


def get(store: Store, key: str, names: Sequence[str]) -> tuple[Segment, ChunkKV | None, int]:
    """Read a segment, its KV if that is among the names, and count the bytes read."""
    tensors, size = store.get(key, names)
    features = tensors.get("features", torch.empty(0, 0))
    segment = Segment(tensors["ids"], tensors["positions"], tensors["images"], features)
    if "keys" not in tensors:
        return segment, None, size
    return segment, ChunkKV(segment, tensors["keys"], tensors["values"]), size
