"""The command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import transformers
import typer
from rich.table import Table
from transformers import AutoConfig

from mpic_rag import cli_ask as ask_
from mpic_rag import demo as demo_
from mpic_rag import guide
from mpic_rag.cli_ask import Int8Option, ModelOption, ModeOption, OwnerOption
from mpic_rag.cli_bench import bench_app
from mpic_rag.cli_index import index as index_command
from mpic_rag.cli_store import store_app
from mpic_rag.compiler import Mode
from mpic_rag.engine import Engine
from mpic_rag.families import FAMILIES, check
from mpic_rag.index import Index, settings
from mpic_rag.indexing.collection import FILE
from mpic_rag.model import BUNDLED, Model, locate
from mpic_rag.output import (
    DEFAULT_STORE,
    JsonOption,
    RemoteOption,
    StoreOption,
    console,
    fail,
    log,
    progress_bars,
    with_json_target,
    write_json,
)
from mpic_rag.store import Store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Answers from pictures and texts whose KV caches are already computed.\n\n"
    "Start with `mpic-rag demo`; then `mpic-rag ask 'who keeps larkmouth?'`.",
)

app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")
app.command()(index_command)
app.command()(ask_.ask)

_INTERRUPTED = 130  # the status that Typer makes of Ctrl-C


@app.command()
def demo(
    store: StoreOption = DEFAULT_STORE,
    around: Annotated[
        int, typer.Option(min=0, help="Passages to show before and behind each that is found.")
    ] = 1,
    whole_shelf: Annotated[
        bool, typer.Option("--whole-shelf", help="Show all of a shelf, pages in random order.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Ask the bundled guide 45 questions by every method, and compare answers and times.

    The guide is indexed first. Each question is answered from what is found in its shelf.
    """
    model = Model.load()
    (documents, isolated), asks = demo_.methods(model, Store(store))
    if whole_shelf:
        pages = [page for shelf in guide.shelves().values() for page in shelf]
        chunks = demo_.whole_shelf()
    else:
        with progress_bars() as told:
            indexes = demo_.index(documents, store / "guide", told)
        pages = demo_.pages(indexes)
        chunks = demo_.found(indexes, around)
    for engine in (documents, isolated):
        ask_.compile_documents(engine, pages, f"Compiling the guide ({engine.compiler.mode})")
    rows = []
    total = len(guide.questions()) * len(asks)
    with progress_bars() as told:
        for row in demo_.run(asks, "bundled", chunks):
            rows.append(row)
            told("Asking", len(rows), total)
    if json:
        write_json(rows, json)
    if json != "-":
        console.print(demo_.answers_table(rows))
        console.print(demo_.summary_table(rows))
        console.print(demo_.context(rows))


@app.command("compile")
def compile_(
    sources: Annotated[
        list[Path], typer.Argument(help="Indexes; or Markdown, text and picture files or folders.")
    ],
    model: ModelOption = None,
    store: ask_.StoreOption = None,
    remote: RemoteOption = None,
    owner: OwnerOption = None,
    int8: Int8Option = False,
    mode: ModeOption = "document",
) -> None:
    """Compile documents ahead of questions; what is compiled already is skipped."""
    indexes = [path for path in sources if (path / FILE).is_file()]
    known = [settings(path) for path in indexes]
    names = [model] if model else sorted({one["model"] for one in known}) or [str(BUNDLED)]
    places = [store] if store else sorted({one["store"] for one in known}) or [DEFAULT_STORE]
    if len(names) > 1:
        raise ValueError(f"these indexes have different models: {', '.join(names)}")
    if len(places) > 1:
        raise ValueError("compile one index at a time, or say with --store where to")
    (name,), (place,) = names, places
    kept = Store(place, remote=remote, int8=int8)
    engine = Engine(Model.load(name), kept, mode=cast(Mode, mode), owner=owner)
    documents = [d for path in sources if path not in indexes for d in ask_.read(path)]
    total = sum(len(d.chunks) for d in documents)
    ask_.warn_of_unknown_text(
        engine.model, ask_.texts(c for d in documents for c in d.chunks), name
    )
    new = ask_.compile_documents(engine, documents, "Compiling") if documents else 0
    for path in indexes:
        index = Index(path, engine=engine)
        with progress_bars() as told:
            report = index.compile(progress=told)
        new += report.compiled
        total += sum(len(row.chunks) for row in index.collection.rows())
        for document, reason in report.uncompiled:
            log.print(f"not compiled: {document[:12]}: {reason}", markup=False)
    ask_.close(kept)
    console.print(f"{new} of {total} chunks compiled, {total - new} were there; store: {place}")


@app.command("model")
def model_(
    name: Annotated[str, typer.Argument(help="Model folder or hub name.")] = str(BUNDLED),
    json: JsonOption = None,
) -> None:
    """Say what a model is, whether it is supported, and what its caches take."""
    try:
        source, options = locate(name)
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"can't read the model {name}: {str(error).splitlines()[0]}") from error
    family = check(config)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * head
    facts = {
        "model": name,
        "family": config.model_type,
        "supported": True,
        "reads": "texts and pictures" if family.markers else "texts",
        "layers": text.num_hidden_layers,
        "kv_heads": text.num_key_value_heads,
        "head_dim": head,
        "context_tokens": text.max_position_embeddings,
        "positions": f"{family.axes}-D RoPE",
        "kv_bytes_per_token_fp32": 4 * numbers,
        "kv_bytes_per_token_bf16": 2 * numbers,
    }
    if json:
        write_json([facts], json)
    if json != "-":
        table = Table(show_header=False)
        for key, value in facts.items():
            table.add_row(key.replace("_", " "), str(value))
        console.print(table)
        console.print(f"Families: {', '.join(FAMILIES)}.")


def main() -> None:
    """Run the command line; problems with input end in one line, not in a traceback."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.argv[1:] = with_json_target(sys.argv[1:])
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            log.print("interrupted; what was compiled is kept, run the same command to go on")
        raise
    except (ValueError, OSError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
