"""How well passages are found: python benchmarks/retrieval.py PATH... [--text-embedder NAME].

Indexes folders without caches and asks for figures by their captions and for sections by their
titles. Weights are chosen on one half of these questions, the table is of the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from rich.table import Table

from mpic_rag.engine import Engine
from mpic_rag.index import NONE, Index
from mpic_rag.indexing.build import Options
from mpic_rag.indexing.passages import CHARACTERS
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import console, progress_bars, with_json_target, write_json
from mpic_rag.retrievers.embedders import BUNDLED_CLIP
from mpic_rag.retrievers.probes import calibrate, fused, probes, score
from mpic_rag.store import Store

Row = dict[str, object]


def measure(index: Index, limit: int) -> list[Row]:
    """A row for each kind of question and ranking."""
    weights = calibrate(index.search)
    asked = probes(index.collection, 1, limit)
    began = perf_counter()
    rankings = [index.search.rankings(probe.question) for probe in asked]
    seconds = (perf_counter() - began) / max(1, len(asked))
    ways = {
        name: [ranking.get(name, []) for ranking in rankings]
        for name in ("words", "text", "picture")
        if any(ranking.get(name) for ranking in rankings)
    }
    ways["fused"] = fused(rankings, weights)
    rows: list[Row] = []
    for kind in ("figure", "section"):
        mine = [n for n, probe in enumerate(asked) if probe.kind == kind]
        for method, found in ways.items():
            scores = score([found[n] for n in mine], [asked[n] for n in mine])
            rows.append(
                {
                    "what": "retrieval",
                    "kind": kind,
                    "method": method,
                    "questions": scores.questions,
                    "recall_5": scores.recall_5,
                    "mrr": scores.mrr,
                    "weight": weights.get(method, 1.0),
                    "seconds_each": seconds,
                }
            )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--text-embedder", default=NONE)
    parser.add_argument("--picture-embedder", default=str(BUNDLED_CLIP))
    parser.add_argument("--model", default=str(BUNDLED))
    parser.add_argument("--passage", type=int, default=CHARACTERS, help="characters of one")
    parser.add_argument("--limit", type=int, default=200, help="questions of a kind")
    parser.add_argument("--quick", action="store_true", help="20 questions of a kind")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(with_json_target(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder, progress_bars() as told:
        engine = Engine(Model.load(args.model), Store(Path(folder) / "caches"))
        index = Index(
            folder,
            engine=engine,
            create=True,
            text=args.text_embedder,
            pictures=args.picture_embedder,
        )
        began = perf_counter()
        report = index.update(args.paths, Options(args.passage), told, compile=False)
        seconds = perf_counter() - began
        rows = measure(index, 20 if args.quick else args.limit)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    about = {
        "what": "index",
        "documents": report.documents,
        "passages": report.passages,
        "skipped": len(report.skipped),
        "seconds": seconds,
        "bytes": size,
        **{f"note: {what}": count for what, count in report.notes.items()},
    }
    if args.json:
        write_json([about, *rows], args.json)
    if args.json != "-":
        table = Table(title="Found by caption and by title")
        for column in ("kind", "method", "questions", "recall@5", "MRR"):
            table.add_column(column)
        for row in rows:
            scores = f"{row['recall_5']:.3f}", f"{row['mrr']:.3f}"
            table.add_row(str(row["kind"]), str(row["method"]), str(row["questions"]), *scores)
        console.print(about)
        console.print(table)


if __name__ == "__main__":
    main()
