"""`mpic-rag index`: folders of documents to something that can be asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from mpic_rag.compiler import compute
from mpic_rag.index import Index
from mpic_rag.indexing.build import Options, Report
from mpic_rag.indexing.files import KINDS, read_file, walk
from mpic_rag.indexing.passages import CHARACTERS, passages
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import JsonOption, console, progress_bars, write_json


def index(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...",
            help="Files and folders to add; without any, what was indexed before is brought up"
            f" to date. Reads {', '.join(sorted(KINDS))}.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the index.")] = Path("mpic_index"),
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model folder, .gguf file or hub name; default: bundled."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text-embedder",
            help="A sentence-transformers model, such as all-MiniLM-L6-v2; `none`: words only.",
        ),
    ] = None,
    pictures: Annotated[
        str | None,
        typer.Option(
            "--picture-embedder",
            help="An open_clip model, such as ViT-B-32/laion2b_s34b_b79k; default: bundled.",
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            envvar="MPIC_RAG_STORE",
            help="Folder of caches, remembered; default: inside the index.",
        ),
    ] = None,
    characters: Annotated[
        int | None,
        typer.Option(
            "--passage",
            min=0,
            help=f"Characters of a passage, about; 0: each paragraph alone; default {CHARACTERS}.",
        ),
    ] = None,
    page_pictures: Annotated[
        bool, typer.Option("--page-pictures", help="Show each PDF page as a picture, too.")
    ] = False,
    compile_: Annotated[
        bool,
        typer.Option("--compile/--no-compile", help="Compute caches now, or with `compile`."),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take; writes nothing.")
    ] = False,
    forget: Annotated[
        list[Path] | None, typer.Option(help="A path that is no longer to be indexed.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Read documents, find their passages and pictures, and compile their caches.

    Run it again after files changed: only what changed is done again. Ctrl-C is safe. Pictures on
    the web are not fetched.
    """
    changed: dict[str, Any] = {"characters": characters} if characters is not None else {}
    changed |= {"pages_as_pictures": True} if page_pictures else {}
    if dry_run:
        _estimate(list(paths or []), Options(**changed), model, json)
        return
    began = perf_counter()
    found = Index(out, model=model, store=store, create=True, text=text, pictures=pictures)
    for path in forget or []:
        found.forget(path)
    options = Options(**{**found.settings.get("options", {}), **changed})
    with progress_bars() as told:
        report = found.update(paths or [], options, told, compile_)
    found.close()
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    row = _row(report, perf_counter() - began, size)
    if json:
        write_json([row], json)
    if json != "-":
        console.print(_table(report, row))
        if report.skipped:
            console.print(_skipped(report.skipped, "Skipped files"))
        if report.uncompiled:
            console.print(_skipped(report.uncompiled, "Documents without caches"))
        console.print(f"Ask it: mpic-rag ask {out} 'your question'", highlight=False)


def _row(report: Report, seconds: float, size: int) -> dict[str, object]:
    states = ("new", "changed", "renamed", "unchanged", "deleted", "duplicate", "skipped")
    return {
        "what": "index",
        **{f"files_{state}": report.files[state] for state in states},
        "documents": report.documents,
        "passages": report.passages,
        "chunks": report.chunks,
        "chunks_compiled": report.compiled,
        "caches_deleted": report.deleted,
        "documents_without_caches": len(report.uncompiled),
        "bytes": size,
        "seconds": seconds,
        "skipped": [{"path": path, "reason": reason} for path, reason in report.skipped],
        "notes": dict(report.notes),
    }


def _table(report: Report, row: dict[str, object]) -> Table:
    table = Table(title="Index", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in row.items():
        if name in ("what", "skipped", "notes", "bytes", "seconds"):
            continue
        if value or not name.startswith(("files_", "documents_without", "caches_")):
            table.add_row(name.replace("_", " "), f"{value:,}")
    table.add_row("on disk", f"{float(str(row['bytes'])) / 1e6:,.1f} MB")
    table.add_row("took", f"{float(str(row['seconds'])):,.1f} s")
    for what, count in report.notes.most_common():
        table.add_row(escape(what), f"{count:,}")
    return table


def _skipped(pairs: list[tuple[str, str]], title: str) -> Table:
    table = Table(title=title)
    for column in ("what", "why"):
        table.add_column(column, overflow="fold")
    for path, reason in pairs[:20]:
        table.add_row(escape(repr(path)[1:-1]), escape(reason))
    if len(pairs) > 20:
        table.caption = f"and {len(pairs) - 20} more: --json lists all"
    return table


def _estimate(paths: list[Path], options: Options, model: str | None, json: str | None) -> None:
    """What indexing would take: everything is read, nothing is kept."""
    if not paths:
        raise ValueError("nothing to index: name a file or a folder")
    loaded = Model.load(model or BUNDLED)
    chunks = tokens = shown = 0
    reasons: Counter[str] = Counter()
    files = [(file, path) for path in paths for file in walk(path)]
    with progress_bars() as told:
        for done, (file, root) in enumerate(files):
            told("Reading", done, len(files))
            inside = root if root.is_dir() else root.parent
            try:
                content = read_file(file, inside, options.pages_as_pictures)
            except (ValueError, OSError) as error:
                reasons[str(error)] += 1
                continue
            for passage in passages(content, options.characters):
                shown += passage.picture is not None
                chunks += len(passage.parts)
                tokens += sum(loaded.count(part) + 1 for part in passage.parts)
        told("Reading", len(files), len(files))
    rate = _rate(loaded)
    numbers = 2 * loaded.layers * loaded.kv_heads * loaded.head_dim
    row = {
        "what": "estimate",
        "files": len(files),
        "skipped": sum(reasons.values()),
        "pictures": shown,
        "chunks": chunks,
        "tokens": tokens,
        "bytes": tokens * numbers * loaded.dtype.itemsize,
        "minutes": tokens / rate / 60,
    }
    if json:
        write_json([row], json)
    if json != "-":
        table = Table(title="Estimate; nothing was written", show_header=False)
        for name, value in row.items():
            if name == "bytes":
                table.add_row("caches", f"{float(str(value)) / 1e6:,.1f} MB")
            elif name == "minutes":
                table.add_row("compiling", f"{float(str(value)):,.1f} minutes here, texts' speed")
            elif name != "what":
                table.add_row(name, f"{value:,}")
        for reason, count in reasons.most_common():
            table.add_row(escape(reason), f"{count:,}")
        console.print(table)


def _rate(model: Model) -> float:
    """Tokens a second in one pass, by trying."""
    ids = [n % 100 + 10 for n in range(min(512, model.max_tokens // 2))]
    segment = model.text_segment(ids)
    with model.lock, torch.inference_mode():
        compute(model, [segment])
        began = perf_counter()
        compute(model, [segment])
        return len(ids) / (perf_counter() - began)
