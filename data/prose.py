"""Makes the prompts of `mpic-rag bench quality` on prose: python data/prose.py.

Paragraphs come from Python's own documentation (the language reference that `help()` shows, and
the standard library's module texts; PSF licence). Each prompt holds passages of as many different
documents, and asks about a term that stands in one passage alone, or for the continuation of a
sentence that follows one passage in its document and is not in the prompt. The file is kept, so
that figures stay comparable: what this makes depends on the version of Python.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

OUT = Path(__file__).parent.parent / "mpic_rag" / "bench" / "prose.json"
PROMPTS = 60  # of a kind
CHUNKS = 8
FEWEST, MOST = 240, 560  # characters of a paragraph
_CODE = re.compile(r"::=|>>>|\+--|\|  |====|\*\*\*\*|-----")
_TERM = re.compile(r'"([A-Za-z_][\w. ]{2,30})"')


def documents() -> dict[str, list[str]]:
    """Title and consecutive paragraphs of all that Python has to say."""
    found: dict[str, list[str]] = {}
    for text in topics.values():
        title, _, rest = text.lstrip().partition("\n")
        found[title.strip()] = paragraphs(rest)
    for name in sorted(sys.stdlib_module_names):
        spec = None if name.startswith("_") else importlib.util.find_spec(name)
        if not spec or not spec.origin or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin).read_text())
        found[f"Module {name}"] = paragraphs(ast.get_docstring(tree) or "")
    first: dict[str, str] = {}  # paragraphs are repeated
    for title, some in found.items():
        for text in some:
            first.setdefault(text, title)
    new = {title: [p for p in some if first[p] == title] for title, some in found.items()}
    return {title: some for title, some in new.items() if some}


def paragraphs(text: str) -> list[str]:
    """Whole sentences of prose; no code, no grammar, no tables."""
    flat = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [
        block
        for block in flat
        if FEWEST <= len(block) <= MOST
        and re.match(r"[A-Z\"]", block)
        and block.endswith((".", ".)"))
        and not _CODE.search(block)
    ]


def main() -> None:
    """Write the file."""
    rng = random.Random(1)
    known = documents()
    passages = [{"document": title, "text": text} for title in known for text in known[title]]
    place = {passage["text"]: n for n, passage in enumerate(passages)}
    prompts: list[dict[str, object]] = []
    for kind in ("question", "continuation"):
        while sum(prompt["kind"] == kind for prompt in prompts) < PROMPTS:
            chosen = [rng.choice(known[title]) for title in rng.sample(sorted(known), CHUNKS)]
            asked = _question(rng, chosen) if kind == "question" else _continuation(chosen, known)
            if asked:
                chunks = [place[text] for text in chosen]
                prompts.append({"kind": kind, "chunks": chunks, "question": asked})
    used = sorted({n for prompt in prompts for n in prompt["chunks"]})  # type: ignore[attr-defined]
    new = {old: n for n, old in enumerate(used)}
    for prompt in prompts:
        prompt["chunks"] = [new[n] for n in prompt["chunks"]]  # type: ignore[attr-defined]
    kept = {
        "source": f"documentation of Python {sys.version.split()[0]}, PSF licence",
        "passages": [passages[n] for n in used],
        "prompts": prompts,
    }
    OUT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts over {len(used)} passages of {len(known)} documents")


def _question(rng: random.Random, chosen: list[str]) -> str:
    """Ask about a term that stands in one of the passages alone."""
    for text in rng.sample(chosen, len(chosen)):
        others = " ".join(other for other in chosen if other is not text)
        terms = [term for term in _TERM.findall(text) if term not in others]
        if terms:
            return f'What does the text say about "{terms[0]}"?'
    return ""


def _continuation(chosen: list[str], known: dict[str, list[str]]) -> str:
    """Give the first words of what follows one of the passages in its document."""
    for text in chosen:
        (document,) = (some for some in known.values() if text in some)
        following = document[document.index(text) + 1 :][:1]
        if following:
            return f"Continue this text: {' '.join(following[0].split()[:12])}"
    return ""


if __name__ == "__main__":
    main()
