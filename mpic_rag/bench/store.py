"""What the store costs: loading against computing on tiers of every speed, overlap, int8."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from mpic_rag.documents import Chunk, Document
from mpic_rag.engine import Engine
from mpic_rag.model import Model
from mpic_rag.store import Store
from mpic_rag.store.entry import Entry, Read
from mpic_rag.store.files import Stored
from mpic_rag.store.local import Local

Row = dict[str, Any]
Ask = Callable[[Engine, str], float]
QUESTION = "What is this about?"
WORDS = ("the", "of", "and", "to", "in", "is", "on", "at", "by", "for", "with", "from", "that")


def documents(model: Model, count: int, tokens: int) -> list[Document]:
    """One-chunk documents of about so many tokens each, of random words."""
    draw, made = random.Random(count), []
    for n in range(count):
        words: list[str] = []
        while len(model.codec.encode(" ".join(words))) < tokens - 2:
            words += [*draw.choices(WORDS, k=max(1, tokens // 8)), str(draw.randrange(1000))]
        ids = model.codec.encode(" ".join(words))[: tokens - 2]
        text = model.codec.tokenizer.decode(ids).strip()
        made.append(Document.of(f"page {n}", [[text]]))
    return made


class SlowDisk:
    """Makes a library's disk deliver so many bytes a second, whoever reads; or forget its cache."""

    def __init__(self, disk: Local, rate: float | None = None, cold: bool = False) -> None:
        self.disk, self.rate, self.cold = disk, rate, cold
        self._open, self._free_at = disk.open, 0.0

    def __enter__(self) -> None:
        self.disk.open = self._slowly  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self.disk.open = self._open  # type: ignore[method-assign]

    def _slowly(self, stored: Stored) -> Entry:
        if self.cold:
            self._forget(stored)
        entry = self._open(stored)
        if self.rate:
            entry._read = partial(self._wait, entry._read)
            self._charge(entry.bytes_read)
        return entry

    def _wait(self, read: Read, start: int, end: int) -> torch.Tensor:
        self._charge(end - start)
        return read(start, end)

    def _charge(self, size: int) -> None:
        assert self.rate
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / self.rate
        time.sleep(self._free_at - now)

    def _forget(self, stored: Stored) -> None:
        fd = os.open(self.disk.folder / "entries" / stored.file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ttft(engine: Engine, chunks: list[Chunk], selector: str) -> float:
    """Seconds to the first token."""
    return engine.ask(QUESTION, chunks, selector=selector, max_tokens=1).report.ttft_s


def never_slower(
    model: Model, folder: Path, counts: list[int], tokens: int, rounds: int
) -> Iterator[Row]:
    """Adaptive loading against loading everything and computing everything, tier by tier."""
    for count in counts:
        pages = documents(model, count, tokens)
        chunks = [page.chunks[0] for page in pages]
        home = folder / str(count)
        writer = Engine(model, Store(home))
        writer.compile(pages)
        size = sum(row.size for row in writer.libraries[0].rows())
        ttft(writer, chunks, "full")
        compute_s = ttft(writer, chunks, "full")
        even = size / compute_s
        settings: dict[str, dict[str, Any]] = {
            "memory": {"memory": True},
            "warm disk": {},
            "cold disk": {"cold": True},
            **{f"{x:g} x break-even": {"rate": x * even} for x in (0.25, 0.5, 1, 2, 4)},
        }
        for name, setting in settings.items():
            memory = 1 << 34 if setting.pop("memory", False) else 0
            stores = {a: Store(home, memory=memory, adaptive=a) for a in (True, False)}
            for store in stores.values():
                store.costs.path = None
            engines = {a: Engine(model, store) for a, store in stores.items()}
            seconds: dict[str, list[float]] = {"load": [], "compute": [], "adaptive": []}
            with contextlib.ExitStack() as stack:
                if setting:
                    for engine in engines.values():
                        stack.enter_context(SlowDisk(engine.libraries[0].disk, **setting))
                for _ in range(2):  # warm-up, in which the speeds are measured
                    ttft(engines[True], chunks, "none")
                    engines[True].drain()
                ttft(engines[False], chunks, "none")
                engines[False].drain()
                for _ in range(rounds):
                    seconds["load"].append(ttft(engines[False], chunks, "none"))
                    engines[False].drain()
                    seconds["compute"].append(ttft(engines[False], chunks, "full"))
                    seconds["adaptive"].append(ttft(engines[True], chunks, "none"))
                    engines[True].drain()
            ratios = [
                a / min(x, y)
                for a, x, y in zip(
                    seconds["adaptive"], seconds["load"], seconds["compute"], strict=True
                )
            ]
            best = min(median(seconds["load"]), median(seconds["compute"]))
            yield {
                "what": "never slower",
                "chunks": count,
                "setting": name,
                "mb_per_s": setting.get("rate", 0) / 1e6 or None,
                **{f"{k}_s": median(v) for k, v in seconds.items()},
                "ratio": median(seconds["adaptive"]) / best,
                "worst": max(ratios),
                "ok": median(seconds["adaptive"]) <= 1.05 * best,
            }
            for store in stores.values():
                store.close()
        writer.store.close()


def overlap(model: Model, folder: Path, count: int, tokens: int, rounds: int) -> Iterator[Row]:
    """Half of the chunks missing, on a disk as slow as computing: both at once against in turn."""
    pages = documents(model, count, tokens)
    chunks = [page.chunks[0] for page in pages]
    half = chunks[1::2]
    engine = Engine(model, Store(folder / "overlap", memory=0, adaptive=False))
    engine.compile(pages[1::2])
    engine.compile_later = lambda chunks: None  # type: ignore[method-assign]
    ttft(engine, chunks[0::2], "full")
    compute_s = ttft(engine, chunks[0::2], "full")
    size = sum(row.size for row in engine.libraries[0].rows())
    seconds: dict[str, list[float]] = {"both": [], "load": [], "compute": []}
    with SlowDisk(engine.libraries[0].disk, rate=size / compute_s):
        for _ in range(rounds):
            seconds["both"].append(ttft(engine, chunks, "none"))
            seconds["load"].append(ttft(engine, half, "none"))
            seconds["compute"].append(ttft(engine, chunks[0::2], "full"))
    both, load, compute = (median(seconds[k]) for k in ("both", "load", "compute"))
    ratio = both / (load + compute)
    yield {
        "what": "overlap",
        "chunks": count,
        "load_s": load,
        "compute_s": compute,
        "adaptive_s": both,
        "ratio": ratio,
        "ok": ratio < 0.8,
    }
    engine.store.close()


def int8(
    model: Model, folder: Path, pages: list[Document], questions: list[str], steps: int = 8
) -> Row:
    """Bytes, and how far answers drift, of an int8 store against the model's own dtype."""
    chunks = [chunk for page in pages for chunk in page.chunks]
    engines = [
        Engine(model, Store(folder / f"int8-{i}", memory=0, adaptive=False, int8=i))
        for i in (False, True)
    ]
    for engine in engines:
        engine.compile(pages)
    sizes = [sum(row.size for row in e.libraries[0].rows()) for e in engines]
    drift, same = [], 0
    for question in questions:
        logits = [_logits(engine, question, chunks, steps) for engine in engines]
        log_p, log_q = (F.log_softmax(x, dim=-1) for x in logits)
        drift.append(float((log_p.exp() * (log_p - log_q)).sum(-1)[0]))
        same += int(logits[0][0].argmax() == logits[1][0].argmax())
    for engine in engines:
        engine.store.close()
    return {
        "what": "int8",
        "chunks": len(chunks),
        "bytes_ratio": sizes[1] / sizes[0],
        "bytes_ratio_bf16": sizes[1] / sizes[0] * model.dtype.itemsize / 2,
        "kl": sum(drift) / len(drift),
        "same_token": same / len(questions),
        "ok": sum(drift) / len(drift) <= 0.005,
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
