"""What the store costs: loading against computing from places of every speed, both at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from rich.progress import Progress

from mpic_rag.bench.places import Place, remote, ttft
from mpic_rag.bench.proxy import Proxy
from mpic_rag.documents import Chunk, Document
from mpic_rag.engine import Engine
from mpic_rag.model import Model
from mpic_rag.store import Store
from mpic_rag.store.entry import checksum

Row = dict[str, Any]
BRIEF, OFTEN = 4.0, 5  # a place's turn in a round: so many seconds, at most so many times
LIMIT = 1.05  # of the better of loading and computing everything
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


def compiled(
    model: Model, home: Path, pages: list[Document], port: int | None = None
) -> tuple[list[Chunk], int]:
    """Compile pages into a store, and onto a server; returns their chunks and bytes."""
    engine = Engine(model, Store(home, memory=0, **(remote(port, 60.0) if port else {})))
    engine.compile(pages)
    engine.drain()
    size = sum(row.size for row in engine.libraries[0].rows())
    engine.store.close()
    return [chunk for page in pages for chunk in page.chunks], size


def compute_s(model: Model, home: Path, chunks: list[Chunk]) -> float:
    """Seconds to the first token by full prefill, once warm."""
    engine = Engine(model, Store(home, memory=0))
    seconds = [ttft(engine, chunks, "full") for _ in range(2)]
    engine.store.close()
    return seconds[1]


def never_slower(
    model: Model,
    home: Path,
    count: int,
    tokens: int,
    rounds: int,
    port: int | None,
    progress: Progress,
) -> Iterator[Row]:
    """Adaptive loading against loading everything and computing everything, place by place.

    All take turns within a round; ratios are of one round, to the way that is better on the whole.
    """
    chunks, size = compiled(model, home, documents(model, count, tokens), port)
    even = size / compute_s(model, home, chunks)
    with contextlib.ExitStack() as stack:
        places = [
            Place("memory", memory=True),
            Place("warm disk"),
            Place("cold disk", cold=True),
            *(Place(f"disk at {x:g}x", rate=x * even) for x in (0.5, 1, 2, 4)),
        ]
        for delay in (0.0, 0.05) if port else ():
            proxy = stack.enter_context(Proxy(port or 0, delay))
            places.append(Place(f"remote, {delay * 1e3:.0f} ms", port=proxy.port))
        engines = {
            (place.name, adaptive): stack.enter_context(place.engine(model, home, adaptive))
            for place in places
            for adaptive in (True, False)
        }
        task = progress.add_task(f"{count} x {tokens} tokens", total=(rounds + 1) * len(places))
        seconds: dict[tuple[str, str], list[float]] = {}
        for place in places:  # warm-up: the first load is measured, and computing behind it
            for adaptive in (True, True, False)[: 3 if place.memory else 2]:
                place.ttft(engines[place.name, adaptive], chunks)
            progress.advance(task)
        for round_ in range(rounds):
            full = ttft(engines[places[0].name, False], chunks, "full")
            for place in places:
                turn: list[float] = []
                while sum(turn) < BRIEF and len(turn) < 2 * OFTEN:  # short ones are noisy
                    ways = [("load", False), ("adaptive", True)]
                    for way, adaptive in ways if len(turn) % 4 == round_ % 2 * 2 else ways[::-1]:
                        turn.append(place.ttft(engines[place.name, adaptive], chunks))
                        seconds.setdefault((place.name, way), []).append(turn[-1])
                    seconds.setdefault((place.name, "compute"), []).append(full)
                progress.advance(task)
    for place in places:
        took = {way: seconds[place.name, way] for way in ("load", "compute", "adaptive")}
        best = min(("load", "compute"), key=lambda way: median(took[way]))
        ratios = [a / b for a, b in zip(took["adaptive"], took[best], strict=True)]
        yield {
            "what": "never slower",
            "chunks": count,
            "chunk_tokens": tokens,
            "place": place.name,
            "mb_per_s": place.rate / 1e6 if place.rate else None,
            **{f"{way}_s": median(taken) for way, taken in took.items()},
            "best": best,
            "ratio": median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "ok": median(ratios) <= LIMIT,
        }


def checksums(model: Model, home: Path, tokens: int) -> Row:
    """How much of reading an entry from a warm disk is checking it."""
    engine = Engine(model, Store(home, memory=0))
    engine.compile(documents(model, 1, tokens))
    disk = engine.libraries[0].disk
    (row,) = disk.rows()
    data = torch.frombuffer(bytearray(disk.open(row.entry).raw()), dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"read": [], "check": []}
    for _ in range(20):
        began = perf_counter()
        disk.open(row.entry).kv()
        seconds["read"].append(perf_counter() - began)
        began = perf_counter()
        checksum(data)
        seconds["check"].append(perf_counter() - began)
    engine.store.close()
    read_s, check_s = (median(taken) for taken in seconds.values())
    return {
        "what": "checksums",
        "chunks": 1,
        "chunk_tokens": tokens,
        "gb_per_s": row.size / check_s / 1e9,
        "ratio": check_s / read_s,
    }


def overlap(
    model: Model, home: Path, count: int, tokens: int, rounds: int, port: int | None
) -> Row:
    """Half of the chunks missing, storage as slow as computing: at once, against one by one.

    The storage is the server behind a slow network, where there is one, else a slow disk.
    """
    pages = documents(model, count, tokens)
    half, size = compiled(model, home, pages[1::2], port)
    missing = [page.chunks[0] for page in pages[0::2]]
    rate = size / compute_s(model, home, missing)
    seconds: dict[str, list[float]] = {"both": [], "load": [], "compute": []}
    with contextlib.ExitStack() as stack:
        place = Place("slow", rate=None if port else rate)
        if port:
            place.port = stack.enter_context(Proxy(port, rate=rate)).port
        engine = stack.enter_context(place.engine(model, home, False))
        place.ttft(engine, half)
        for _ in range(rounds):
            seconds["both"].append(place.ttft(engine, [p.chunks[0] for p in pages]))
            seconds["load"].append(place.ttft(engine, half))
            seconds["compute"].append(ttft(engine, missing, "full"))
    ratios = [
        both / (load + compute) for both, load, compute in zip(*seconds.values(), strict=True)
    ]
    return {
        "what": "overlap",
        "chunks": count,
        "chunk_tokens": tokens,
        "place": "remote" if port else "disk",
        "mb_per_s": rate / 1e6,
        **{f"{way}_s": median(taken) for way, taken in seconds.items()},
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ok": median(ratios) < 0.8,
    }


def dead_remote(
    model: Model, home: Path, count: int, tokens: int, asks: int, port: int
) -> Iterator[Row]:
    """Recomputing with a remote that refuses or hangs, against recomputing without a remote."""
    chunks = [page.chunks[0] for page in documents(model, count, tokens)]
    for mode in ("refuse", "hang"):
        with Proxy(port) as proxy:
            proxy.mode = mode
            plain, dead = Place("plain"), Place("dead", port=proxy.port)
            with (
                plain.engine(model, home / mode, True) as without,
                dead.engine(model, home / mode, True) as engine,
            ):
                seconds: dict[str, list[float]] = {"plain": [], "dead": []}
                for _ in range(asks):
                    seconds["plain"].append(ttft(without, chunks, "none"))
                    seconds["dead"].append(ttft(engine, chunks, "none"))
                    engine.drain()
        p95 = {way: quantiles(taken[1:], n=20)[-1] for way, taken in seconds.items()}
        yield {
            "what": "dead remote",
            "place": mode,
            "chunks": count,
            "chunk_tokens": tokens,
            "first_s": seconds["dead"][0],
            "plain_p95_s": p95["plain"],
            "dead_p95_s": p95["dead"],
            "ratio": p95["dead"] / p95["plain"],
            "ok": p95["dead"] <= 1.1 * p95["plain"],
        }
