"""Renders the bundled collection: python data/make_guide.py [--out data/guide] [--seed 7].

A page becomes one Markdown file; its chunks are the blocks between blank lines.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

from mpic_rag.data.world import KINDS, Page, Question, Shelf, make_shelf

SHELVES = 3
PER_KIND = 3  # questions of each kind, half of them across a chunk border where there are such


def write_page(page: Page, folder: Path) -> None:
    """One Markdown file and its pictures."""
    blocks = []
    for chunk in page.chunks:
        lines = []
        for part in chunk:
            if isinstance(part, str):
                lines.append(part)
                continue
            name = f"images/{page.name}.png"
            (folder / "images").mkdir(exist_ok=True)
            part.save(folder / name, optimize=True)
            lines.append(f"![picture]({name})")
        blocks.append("\n".join(lines))
    (folder / f"{page.name}.md").write_text("\n\n".join(blocks) + "\n")


def pick(shelf: Shelf) -> list[Question]:
    """A few questions of each kind, split ones and others in turn."""
    chosen = []
    for kind in KINDS:
        pools = [
            [q for q in shelf.questions if q.kind == kind and q.split is split]
            for split in (True, False)
        ]
        taken: list[Question] = []
        while len(taken) < PER_KIND and any(pools):
            pool = pools[len(taken) % 2] or pools[1 - len(taken) % 2]
            taken.append(pool.pop())
        chosen += taken
    return chosen


def write(out: Path, shelves: int = SHELVES, seed: int = 7) -> None:
    """A collection of so many shelves with its `questions.json`."""
    questions = []
    for number in range(1, shelves + 1):
        shelf = make_shelf(random.Random(seed * 1000 + number))
        folder = out / f"shelf-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for page in shelf.pages:
            write_page(page, folder)
        for q in pick(shelf):
            evidence = [[shelf.pages[page].name, chunk] for page, chunk in q.evidence]
            entry = {"shelf": folder.name, "question": q.text, "answer": q.answer, "kind": q.kind}
            questions.append({**entry, "split": q.split, "evidence": evidence})
    text = ",\n".join(json.dumps(q) for q in questions)
    (out / "questions.json").write_text(f"[\n{text}\n]\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "guide")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    write(args.out, seed=args.seed)


if __name__ == "__main__":
    main()
