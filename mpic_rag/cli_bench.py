"""`mpic-rag bench`: measurements that anyone can repeat."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mpic_rag import guide
from mpic_rag.bench import store as store_
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import JsonOption, console, log, write_json

bench_app = typer.Typer(no_args_is_help=True, help="Measure, on this machine.")


@bench_app.callback()
def bench() -> None:
    """Measure, on this machine."""


@bench_app.command("store")
def store(
    model: Annotated[
        str, typer.Option("--model", help="Model folder, .gguf file or hub name.")
    ] = str(BUNDLED),
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 512,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Within a minute.")] = False,
    json: JsonOption = None,
) -> None:
    """Loading against computing on disks of every speed, overlap of both, an int8 store."""
    loaded = Model.load(model)
    counts, rounds = ([1, 4], 2) if quick else ([1, 4, 16], rounds)
    room = loaded.max_tokens - 64
    rows: list[store_.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            size = min(tokens, room // count)
            with log.status(f"{count} chunks of {size} tokens"):
                rows += store_.never_slower(loaded, Path(folder), [count], size, rounds)
        with log.status("overlap"):
            size = min(tokens, room // 4)
            rows += store_.overlap(loaded, Path(folder), 4, size, rounds)
        with log.status("int8"):
            pages = guide.shelves()["shelf-1"]
            asked = [q.question for q in guide.questions() if q.shelf == "shelf-1"]
            if loaded.family.markers is None:
                pages = store_.documents(loaded, 4, min(tokens, 128))
            rows.append(store_.int8(loaded, Path(folder), pages, asked))
    for row in rows:
        row["model"] = model
    if json:
        write_json(rows, json)
    if json != "-":
        for table in _tables(rows):
            console.print(table)


def _tables(rows: list[store_.Row]) -> list[Table]:
    slower = Table(title="Time to first token, medians: is adaptive loading ever slower?")
    for column in ("chunks", "from", "MB/s", "load ms", "compute ms", "adaptive ms", "of the best"):
        slower.add_column(column, justify="left" if column == "from" else "right")
    for r in (r for r in rows if r["what"] == "never slower"):
        slower.add_row(
            str(r["chunks"]),
            r["setting"],
            f"{r['mb_per_s']:.0f}" if r["mb_per_s"] else "",
            *(f"{r[name] * 1e3:.0f}" for name in ("load_s", "compute_s", "adaptive_s")),
            f"[{'green' if r['ok'] else 'red'}]{r['ratio']:.2f}[/]",
        )
    rest = Table(title="Overlap and int8", show_header=False)
    for r in rows:
        if r["what"] == "overlap":
            rest.add_row("load and compute at once, of their sum", f"{r['ratio']:.2f}")
        if r["what"] == "int8":
            rest.add_row("int8: bytes, of the model's own numbers", f"{r['bytes_ratio']:.2f}")
            rest.add_row("int8: bytes, of bfloat16", f"{r['bytes_ratio_bf16']:.2f}")
            rest.add_row("int8: KL at the first token, nats", f"{r['kl']:.5f}")
    return [slower, rest]
