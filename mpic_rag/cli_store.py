"""`mpic-rag store`: look into a store, tidy it, move it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mpic_rag.output import (
    DEFAULT_STORE,
    JsonOption,
    RemoteOption,
    StoreOption,
    console,
    log,
    write_json,
)
from mpic_rag.store import Library, Policy, Store
from mpic_rag.store import archive as archive_
from mpic_rag.store.deletions import digest
from mpic_rag.store.files import Row

store_app = typer.Typer(
    no_args_is_help=True, help="Look into a store of compiled caches, tidy it, move it."
)
Rows = list[dict[str, Any]]
DocumentOption = Annotated[str | None, typer.Option(help="Only the entries of this document.")]


class _Chosen:
    """The store and library that the options before the command named."""

    store: Store
    library: Library


@store_app.callback()
def choose(
    folder: StoreOption = DEFAULT_STORE,
    owner: Annotated[
        str | None, typer.Option(help="The owner of a private library; default: the shared one.")
    ] = None,
    remote: RemoteOption = None,
    remote_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request.")] = 2.0,
) -> None:
    """Look into a store of compiled caches, tidy it, move it."""
    if not folder.is_dir():
        raise ValueError(f"there is no store at {folder}; `mpic-rag compile` makes one")
    _Chosen.store = Store(folder, remote=remote, remote_timeout=remote_timeout)
    _Chosen.library = _Chosen.store.static(owner) if owner else _Chosen.store.dynamic


@store_app.command("ls")
def ls(document: DocumentOption = None, json: JsonOption = None) -> None:
    """List entries, most recently used first."""
    tag = digest(document) if document else None
    rows = []
    for row in _Chosen.library.rows():
        if tag is None or row.document == tag:
            rows.append(_row(row, _facts(_Chosen.library, row)))
    if json:
        write_json(rows, json)
    if json != "-":
        table = Table(title=f"{len(rows)} entries in {_Chosen.library.name}")
        for column in ("key", "chunk", "mode", "tokens", "size", "used", "expires"):
            table.add_column(column, justify="right" if column in ("tokens", "size") else "left")
        for r in rows:
            table.add_row(
                r["key"][:12],
                r["source"],
                r["mode"],
                str(r["tokens"]),
                decimal(r["bytes"]),
                "pinned" if r["pinned"] else _ago(r["used"]),
                "never" if r["expires"] is None else f"in {_span(r['expires'] - time.time())}",
            )
        console.print(table)


def _row(row: Row, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": row.key,
        "source": facts.get("source", "?"),
        "document": facts.get("name", ""),
        "mode": facts.get("mode", "?"),
        "tokens": facts.get("shape", [0, 0, 0])[2],
        "storage": facts.get("storage", "?"),
        "bytes": row.size,
        "stored": row.stored,
        "used": None if row.pinned else row.used,
        "pinned": row.pinned,
        "expires": row.expires,
    }


def _facts(library: Library, row: Row) -> dict[str, Any]:
    entry = library.open(row.key)
    return getattr(entry, "facts", {})


def _span(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def _ago(moment: float) -> str:
    return f"{_span(time.time() - moment)} ago"


@store_app.command("stats")
def stats(json: JsonOption = None) -> None:
    """Say how full the libraries are, and how quick loading and computing were measured to be."""
    store = _Chosen.store
    rows: Rows = []
    for library in store.libraries():
        entries = list(library.rows())
        rows.append(
            {
                "what": "library",
                "name": library.name,
                "entries": len(entries),
                "documents": len({r.document for r in entries if r.document}),
                "pinned": sum(r.pinned for r in entries),
                "bytes": library.disk.volume(),
                "limit": library.policy.limit,
                "ttl_s": library.policy.ttl_s,
                "isolated_only": library.policy.isolated_only,
            }
        )
    for name, tier in store.costs.tiers.items():
        rows.append({"what": "tier", "name": name, **vars(tier)})
    for name, seconds in store.costs.token_s.items():
        rows.append({"what": "model", "name": name, "token_s": seconds})
    if json:
        write_json(rows, json)
    if json != "-":
        console.print(_libraries(rows))
        console.print(_speeds(rows))


def _libraries(rows: Rows) -> Table:
    table = Table(title=f"Libraries in {_Chosen.store.root}")
    for column in ("library", "entries", "documents", "pinned", "size", "limit", "lives"):
        table.add_column(column, justify="left" if column == "library" else "right")
    for r in (r for r in rows if r["what"] == "library"):
        lives = "for ever" if r["ttl_s"] is None else _span(r["ttl_s"])
        sizes = (decimal(r["bytes"]), decimal(r["limit"]))
        counts = (str(r[name]) for name in ("entries", "documents", "pinned"))
        table.add_row(r["name"], *counts, *sizes, lives)
    return table


def _speeds(rows: Rows) -> Table:
    table = Table(title="Measured speeds, by which loading or computing is chosen")
    for column in ("what", "first byte", "then", "samples"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in rows:
        if r["what"] == "tier":
            samples = str(r["samples"]) if r["samples"] else "none: a guess"
            latency = f"{r['latency'] * 1e3:.1f} ms"
            table.add_row(r["name"], latency, f"{decimal(int(r['bandwidth']))}/s", samples)
        elif r["what"] == "model":
            table.add_row(f"model {r['name'][:12]}", "", f"{1 / r['token_s']:.0f} tokens/s", "")
    return table


@store_app.command("check")
def check(json: JsonOption = None) -> None:
    """Read every entry; damaged ones are set aside, and index and files made to agree."""
    library = _Chosen.library
    with _progress() as progress:
        task = progress.add_task("Checking", total=sum(1 for _ in library.rows()))
        found = library.check(lambda: progress.advance(task))
    if json:
        write_json([{"found": text} for text in found], json)
    if json != "-":
        for text in found:
            console.print(f"mended: {text}", markup=False)
        console.print("all is well" if not found else f"{len(found)} faults found and mended")


@store_app.command("gc")
def gc() -> None:
    """Remove what has expired, what no program can read, and what was set aside."""
    library = _Chosen.library
    expired = library.disk.expire()
    foreign = [row.key for row in library.rows() if library.open(row.key) is None]
    library.disk.delete(foreign)
    aside = list(library.disk.quarantine.glob("*"))
    for path in aside:
        path.unlink(missing_ok=True)
    library.disk.tidy()
    console.print(
        f"removed {expired} expired and {len(foreign)} unreadable entries, {len(aside)} set aside"
    )


@store_app.command("rm")
def rm(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys, or their first letters.")] = None,
    document: DocumentOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Every entry of the library.")] = False,
) -> None:
    """Delete entries from every tier."""
    library = _Chosen.library
    if not keys and not document and not everything:
        raise ValueError("name keys, a --document, or --all")
    count = library.delete_document(document) if document else 0
    known = [row.key for row in library.rows()] if keys or everything else []
    chosen = known if everything else list(_named(known, keys or []))
    count += library.delete(chosen) if chosen else 0
    console.print(f"{count} entries deleted")


def _named(known: list[str], prefixes: list[str]) -> Iterator[str]:
    for prefix in prefixes:
        matches = [key for key in known if key.startswith(prefix)]
        if len(matches) != 1 or len(prefix) < 4:
            raise ValueError(f"{prefix!r} names {len(matches)} entries: give more letters")
        yield matches[0]


@store_app.command("pin")
def pin(
    document: Annotated[str, typer.Argument(help="The document's name.")],
    off: Annotated[bool, typer.Option("--off", help="Let it go again.")] = False,
) -> None:
    """Keep a document's entries, however full the store is."""
    tag = digest(document)
    keys = [row.key for row in _Chosen.library.rows() if row.document == tag]
    if not keys:
        raise ValueError(f"no entry belongs to a document {document!r}")
    _Chosen.library.disk.pin(keys, not off)
    console.print(f"{len(keys)} entries {'let go' if off else 'pinned'}")


@store_app.command("rules")
def rules(
    limit: Annotated[int | None, typer.Option(min=1, help="Bytes on this disk.")] = None,
    ttl: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds an unused entry lives; 0: for ever.")
    ] = None,
    isolated_only: Annotated[
        bool | None, typer.Option(help="Never compile a chunk in its document's context.")
    ] = None,
) -> None:
    """Show or change what a library keeps, for how long, and how its chunks are compiled."""
    library = _Chosen.library
    old = library.policy
    library.set_policy(
        Policy(
            old.limit if limit is None else limit,
            old.ttl_s if ttl is None else ttl or None,
            old.isolated_only if isolated_only is None else isolated_only,
        )
    )
    now = library.policy
    lives = f"{_span(now.ttl_s)} unused" if now.ttl_s else "for ever"
    context = "in isolation only" if now.isolated_only else "in their document's context"
    console.print(f"up to {decimal(now.limit)}; entries live {lives}; compiled {context}")


@store_app.command("warm")
def warm(document: DocumentOption = None) -> None:
    """Fetch a library's entries from the remote to this disk, ahead of questions."""
    store, library = _Chosen.store, _Chosen.library
    if not store.remote:
        raise ValueError("name the remote with --remote")
    keys = store.remote.keys(library.name, digest(document) if document else "")
    missing = [key for key in keys if not library.contains(key)]
    with _progress() as progress:
        got = _each(missing, library.fetch, progress, "Fetching")
    console.print(f"{got} of {len(keys)} entries fetched, {len(keys) - len(missing)} were here")
    _faults(store)


@store_app.command("push")
def push() -> None:
    """Bring a library's entries from this disk to the remote, where it lacks them."""
    store, library = _Chosen.store, _Chosen.library
    if not store.remote:
        raise ValueError("name the remote with --remote")
    there = set(store.remote.keys(library.name))
    rows = [row.key for row in library.rows()]
    missing = [key for key in rows if key not in there]
    with _progress() as progress:
        sent = _each(missing, library.push, progress, "Sending")
    console.print(f"{sent} of {len(rows)} entries sent, {len(rows) - len(missing)} were there")
    _faults(store)


def _each(keys: list[str], work: Callable[[str], bool], progress: Progress, name: str) -> int:
    """Do something with every key, several at once; returns how often it succeeded."""
    task, done = progress.add_task(name, total=len(keys)), 0
    with ThreadPoolExecutor(8) as pool:
        for success in pool.map(work, keys):
            done += success
            progress.advance(task)
    return done


def _faults(store: Store) -> None:
    if store.faults.counts:
        log.print(f"faults: {dict(store.faults.counts)}")


@store_app.command("export")
def export(target: Annotated[Path, typer.Argument(help="The .tar file to write.")]) -> None:
    """Write a library to one file."""
    library = _Chosen.library
    with _progress() as progress:
        task = progress.add_task("Exporting", total=sum(1 for _ in library.rows()))
        count = archive_.export(library, target, lambda: progress.advance(task))
    console.print(f"{count} entries, {decimal(target.stat().st_size)}: {target}")


@store_app.command("import")
def import_(source: Annotated[Path, typer.Argument(help="A file that `export` wrote.")]) -> None:
    """Add a library's entries from a file."""
    if not source.is_file():
        raise ValueError(f"there is no file {source}")
    with _progress() as progress:
        task = progress.add_task("Importing", total=None)
        count = archive_.import_(_Chosen.library, source, lambda: progress.advance(task))
    console.print(f"{count} entries stored")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=log)
