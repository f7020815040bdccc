"""How well passages are found: python benchmarks/retrieval.py [PATH...] [--text-embedder NAME].

Indexes folders without caches and asks for figures by their captions and for sections by their
titles; without a folder, fresh shelves like the bundled guide's, and their questions. Weights are
chosen on one half of the questions, the table is of the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

from rich.table import Table

from mpic_rag import guide
from mpic_rag.data.make_guide import write
from mpic_rag.engine import Engine
from mpic_rag.index import NONE, Index
from mpic_rag.indexing.build import Options
from mpic_rag.indexing.passages import CHARACTERS
from mpic_rag.model import BUNDLED, Model
from mpic_rag.output import console, progress_bars, with_json_target, write_json
from mpic_rag.retrievers.embedders import BUNDLED_CLIP
from mpic_rag.retrievers.probes import Probe, choose, fused, probes, ranked, score
from mpic_rag.store import Store

SHELVES = 30  # of 15 questions each
Row = dict[str, object]
Rankings = Mapping[str, Sequence[str]]


def measure(
    chosen_on: Sequence[Probe], asked: Sequence[Probe], rank: Callable[[Probe], Rankings]
) -> list[Row]:
    """A row for each kind of question and each way of ranking."""
    weights = choose([rank(probe) for probe in chosen_on], chosen_on)
    began = perf_counter()
    rankings = [rank(probe) for probe in asked]
    seconds = (perf_counter() - began) / max(1, len(asked))
    ways = {
        name: [ranking.get(name, []) for ranking in rankings]
        for name in ("words", "text", "picture")
        if any(ranking.get(name) for ranking in rankings)
    }
    ways["fused"] = fused(rankings, weights)
    rows: list[Row] = []
    for kind in [*dict.fromkeys(probe.kind for probe in asked), "all"]:
        mine = [n for n, probe in enumerate(asked) if kind in (probe.kind, "all")]
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


def measure_guide(folder: Path, indexes: dict[str, Index]) -> list[Row]:
    """A guide's own questions, each to its shelf; the even ones choose the weights."""
    halves: tuple[list[Probe], list[Probe]] = ([], [])
    shelf_of: dict[Probe, str] = {}
    for number, question in enumerate(guide.questions(folder)):
        collection = indexes[question.shelf].collection
        pages = {Path(path).stem: document for document, path in collection.paths().items()}
        wanted = {(pages[page], place) for page, place in question.evidence}
        answers = [row.id for row in collection.rows() if (row.document, row.number) in wanted]
        probe = Probe(question.kind, question.question, frozenset(answers))
        shelf_of[probe] = question.shelf
        halves[number % 2].append(probe)
    return measure(*halves, lambda probe: ranked(indexes[shelf_of[probe]].search, probe))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
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
        fresh = Path(folder) / "guide"
        if not args.paths:
            write(fresh, 3 if args.quick else SHELVES, seed=91)
        shelves = [(path.name, [path]) for path in sorted(fresh.glob("shelf-*"))]
        indexes, reports = {}, []
        began = perf_counter()
        for name, paths in [("all", args.paths)] if args.paths else shelves:
            index = Index(
                Path(folder) / name,
                engine=engine,
                create=True,
                text=args.text_embedder,
                pictures=args.picture_embedder,
            )
            options = Options(args.passage if args.paths else 0)
            reports.append(index.update(paths, options, told, compile=False))
            indexes[name] = index
        seconds = perf_counter() - began
        if args.paths:
            limit = 20 if args.quick else args.limit
            search = indexes["all"].search
            halves = [probes(search.collection, half, limit) for half in (0, 1)]
            rows = measure(*halves, lambda probe: ranked(search, probe))
        else:
            rows = measure_guide(fresh, indexes)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    about = {
        "what": "index",
        **{
            name: sum(getattr(report, name) for report in reports)
            for name in ("documents", "passages")
        },
        "skipped": sum(len(report.skipped) for report in reports),
        "seconds": seconds,
        "bytes": size,
        **{f"note: {what}": count for report in reports for what, count in report.notes.items()},
    }
    if args.json:
        write_json([about, *rows], args.json)
    if args.json != "-":
        table = Table(title="What is found")
        for column in ("kind", "method", "questions", "recall@5", "MRR"):
            table.add_column(column)
        for row in rows:
            scores = f"{row['recall_5']:.3f}", f"{row['mrr']:.3f}"
            table.add_row(str(row["kind"]), str(row["method"]), str(row["questions"]), *scores)
        console.print(about)
        console.print(table)


if __name__ == "__main__":
    main()
