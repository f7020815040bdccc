"""An int8 store against one of the model's own numbers: bytes, and how far answers drift."""

from __future__ import annotations

from pathlib import Path

import torch

from mpic_rag.bench.store import Row
from mpic_rag.documents import Chunk, Document
from mpic_rag.engine import Engine
from mpic_rag.model import Model
from mpic_rag.store import Store


def int8(
    model: Model, folder: Path, pages: list[Document], questions: list[str], steps: int = 8
) -> Row:
    """Bytes, and how far answers drift, of an int8 store against the model's own dtype.

    KL at each of an answer's first `steps` tokens, up to where the answers part.
    """
    chunks = [chunk for page in pages for chunk in page.chunks]
    engines = [
        Engine(model, Store(folder / f"int8-{i}", memory=0, adaptive=False, int8=i))
        for i in (False, True)
    ]
    for engine in engines:
        engine.compile(pages)
    sizes = [sum(row.size for row in e.libraries[0].rows()) for e in engines]
    drift: list[float] = []
    same = 0
    for question in questions:
        exact, coarse = (_logits(engine, question, chunks, steps) for engine in engines)
        together = 0
        for p, q in zip(exact, coarse, strict=False):
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            drift.append(float((log_p.exp() * (log_p - log_q)).sum()))
            if p.argmax() != q.argmax():
                break
            together += 1
        same += together == len(exact)
    for engine in engines:
        engine.store.close()
    kl = sum(drift) / len(drift)
    return {
        "what": "int8",
        "chunks": len(chunks),
        "questions": len(questions),
        "bytes_ratio": sizes[1] / sizes[0],
        "bytes_ratio_bf16": sizes[1] / sizes[0] * model.dtype.itemsize / 2,
        "kl": kl,
        "kl_worst": max(drift),
        "same_answer": same / len(questions),
        "ok": kl <= 0.005,
    }


def _logits(engine: Engine, question: str, chunks: list[Chunk], steps: int) -> torch.Tensor:
    """Scores [tokens, vocabulary] of a greedy answer."""
    seen: list[torch.Tensor] = []
    inner = engine.model.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(inner(hidden))
        return seen[-1]

    engine.model.logits = keep  # type: ignore[method-assign]
    try:
        engine.ask(question, chunks, selector="none", max_tokens=steps)
    finally:
        del engine.model.logits
    return torch.cat(seen)
