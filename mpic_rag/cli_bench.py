"""`mpic-rag bench`: measurements that anyone can repeat."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mpic_rag import guide
from mpic_rag.bench import int8 as int8_
from mpic_rag.bench import places
from mpic_rag.bench import store as store_
from mpic_rag.cli_quality import quality
from mpic_rag.documents import Document
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import JsonOption, console, log, write_json

bench_app = typer.Typer(no_args_is_help=True, help="Measure, on this machine.")
bench_app.command("quality")(quality)


@bench_app.callback()
def bench() -> None:
    """Measure, on this machine."""


@bench_app.command("store")
def store(
    model: Annotated[
        str, typer.Option("--model", help="Model folder, .gguf file or hub name.")
    ] = str(BUNDLED),
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often all ways take turns, at least.")
    ] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Small, within a minute.")] = False,
    json: JsonOption = None,
) -> None:
    """Load or compute, both at once, a dead remote, an int8 store.

    1, 4 and 16 chunks, read from memory, disks of several speeds and an S3 server on loopback
    (with the extra `bench`). A disk's speeds are relative to break-even, where loading takes as
    long as computing. Writes to a temporary folder, which must be on a disk (see TMPDIR).
    """
    loaded = Model.load(model)
    if quick:
        tokens, rounds = min(tokens, 64), 1
    room = loaded.max_tokens - 128  # beside the question and the system prompt
    rows: list[store_.Row] = []

    def take(measured: Iterable[store_.Row]) -> None:
        for row in measured:
            rows.append(row | {"model": model})
        if json and json != "-":  # what there is, in case of an interrupt
            write_json(rows, json)

    with tempfile.TemporaryDirectory() as name, _server() as port, _progress() as progress:
        home = Path(name)
        fourth = min(tokens, room // 4)
        with progress.console.status("Both at once"):
            take([store_.overlap(loaded, home / "overlap", 4, fourth, rounds, port)])
        for count in (1, 4) if quick else (1, 4, 16):
            size = min(tokens, room // count)
            take(store_.never_slower(loaded, home, count, size, rounds, port, progress))
        if port:
            with progress.console.status("A dead remote"):
                asks = 5 if quick else 20
                take(store_.dead_remote(loaded, home, 4, min(fourth, 128), asks, port))
        take([store_.checksums(loaded, home / "checksums", min(tokens, room))])
        with progress.console.status("int8"):
            take([int8_.int8(loaded, home / "int8", *_guide(loaded))])
    if json == "-":
        write_json(rows, json)
    else:
        for table in _tables(rows):
            console.print(table)


@contextlib.contextmanager
def _server() -> Iterator[int | None]:
    if all(importlib.util.find_spec(name) for name in ("moto", "s3fs")):
        with places.s3() as port:
            yield port
    else:
        log.print("without a remote: pip install 'mpic-rag[bench]' measures one", markup=False)
        yield None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=log)


def _guide(model: Model) -> tuple[list[Document], list[str]]:
    """A shelf of the guide and questions on it; for a model of texts, without the pictures."""
    shelf, pages = "shelf-1", []
    for page in guide.shelves()[shelf]:
        chunks = [
            [p for p in c.parts if model.family.markers or isinstance(p, str)] for c in page.chunks
        ]
        pages.append(Document.of(page.name, [parts for parts in chunks if parts]))
    return pages, [q.question for q in guide.questions() if q.shelf == shelf]


def _tables(rows: list[store_.Row]) -> Iterator[Table]:
    slower = Table(title="Seconds to the first token, and adaptive loading's to the better of both")
    slower.add_column("chunks", no_wrap=True)
    slower.add_column("from", no_wrap=True)
    for column in ("MB/s", "load", "compute", "adaptive", "ratio", "range"):
        slower.add_column(column, justify="right", no_wrap=True)
    for r in (r for r in rows if r["what"] == "never slower"):
        slower.add_row(
            f"{r['chunks']}x{r['chunk_tokens']}",
            r["place"],
            f"{r['mb_per_s']:.0f}" if r["mb_per_s"] else "",
            *(f"{r[name]:.3f}" for name in ("load_s", "compute_s", "adaptive_s")),
            _judged(r),
            f"{r['ratio_low']:.2f}-{r['ratio_high']:.2f}",
        )
    yield slower
    rest = Table(title="Besides")
    for column in ("what", "measured"):
        rest.add_column(column)
    for r in rows:
        if r["what"] == "overlap":
            rest.add_row(f"load and compute at once, of their sum ({r['place']})", _judged(r))
        if r["what"] == "dead remote":
            rest.add_row(f"p95 with a remote that will {r['place']}, of none", _judged(r))
        if r["what"] == "checksums":
            speed = f"{r['ratio']:.0%} ({r['gb_per_s']:.1f} GB/s)"
            rest.add_row("checking, of reading an entry from a warm disk", speed)
        if r["what"] == "int8":
            rest.add_row("int8: bytes, of the model's own numbers", f"{r['bytes_ratio']:.2f}")
            rest.add_row("int8: bytes, of bfloat16", f"{r['bytes_ratio_bf16']:.2f}")
            rest.add_row("int8: KL to unquantised answers, nats", _judged(r, "kl", 5))
            rest.add_row("int8: answers that are the same", f"{r['same_answer']:.0%}")
    yield rest


def _judged(row: store_.Row, name: str = "ratio", digits: int = 2) -> str:
    return f"[{'green' if row['ok'] else 'red'}]{row[name]:.{digits}f}[/]"
