"""Time to first token on the bundled guide, by method: python benchmarks/ttft.py [--quick].

8 pictures and 8 texts in context, documents in random order, caches read from disk (page cache
warm). Methods take turns on every question, so that the machine's moods meet them all; each
is warmed up on the first question.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median, quantiles

from rich.progress import track
from rich.table import Table

from mpic_rag import Model, Store, demo, guide
from mpic_rag.cli import DEFAULT_STORE
from mpic_rag.output import console, environment, log, with_json_target, write_json
from mpic_rag.report import STAGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(with_json_target(sys.argv[1:]))
    engines, asks = demo.methods(Model.load(), Store(args.store, memory=0, adaptive=False))
    for engine in engines:
        engine.compile(d for shelf in guide.shelves().values() for d in shelf)
    rows = []
    rounds = 1 if args.quick else args.rounds
    total = rounds * len(guide.questions()) * len(asks)
    retrieve = demo.whole_shelf()
    steps = (row for _ in range(rounds) for row in demo.run(asks, "bundled", retrieve))
    for row in track(steps, "Asking", total=total, console=log):
        rows.append(row)
    if args.json:
        write_json(rows, args.json)
    if args.json != "-":
        console.print(table(rows))
        console.print(demo.context(rows), environment())


def table(rows: list[demo.Row]) -> Table:
    """Medians by method, with the stages that make them up."""
    result = Table(title="time to first token, ms")
    result.add_column("method")
    for column in ("median", "p95", "of full", "recomputed", *STAGES):
        result.add_column(column, justify="right")
    baseline = median(r["ttft_s"] for r in rows if r["method"] == "full")
    for method in demo.METHODS:
        mine = [r for r in rows if r["method"] == method]
        times = [r["ttft_s"] for r in mine]
        result.add_row(
            method,
            f"{median(times) * 1e3:.1f}",
            f"{quantiles(times, n=20)[-1] * 1e3:.1f}",
            f"{median(times) / baseline:.3f}",
            f"{median(r['recomputed'] for r in mine):.0%}",
            *(f"{median(r['seconds'][stage] for r in mine) * 1e3:.1f}" for stage in STAGES),
        )
    return result


if __name__ == "__main__":
    main()
