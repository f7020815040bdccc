"""Tables for people, rows for programs: what every printing command shares."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

DEFAULT_STORE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mpic_rag"
StoreOption = Annotated[
    Path, typer.Option("--store", envvar="MPIC_RAG_STORE", help="Folder of compiled caches.")
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        envvar="MPIC_RAG_REMOTE",
        help="URL of remote storage beside it, such as s3://bucket/folder (extra `s3`).",
    ),
]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="Write JSON to FILE, or to standard output."),
]
console = Console()
log = Console(stderr=True)


def environment() -> dict[str, Any]:
    """What figures depend on besides the code."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on standard error; call what it gives with a title, what is done, and of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=log) as bars:
        tasks: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield told


def write_json(rows: Sequence[dict[str, Any]], target: str) -> None:
    """Write the environment and flat rows to a file, or to standard output for `-`."""
    text = json.dumps({"environment": environment(), "rows": list(rows)}, indent=1)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def with_json_target(arguments: Sequence[str]) -> list[str]:
    """Let `--json` stand alone for standard output: click has no option whose value may lack.

    Only a name in `.json` counts as its value, lest a document that follows be overwritten.
    """
    result: list[str] = []
    for n, argument in enumerate(arguments):
        result.append(argument)
        value = arguments[n + 1] if n + 1 < len(arguments) else None
        named = value is not None and (value == "-" or value.endswith(".json"))
        if argument == "--json" and not named:
            result.append("-")
    return result


def fail(message: str) -> None:
    """Print one line and end with status 1."""
    log.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)
