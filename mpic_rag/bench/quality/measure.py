"""Each case by every method: is the answer right, and how far is it from full prefill's?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from mpic_rag.bench.quality.cases import ANSWER, Case
from mpic_rag.compiler import Mode
from mpic_rag.documents import Chunk, Document
from mpic_rag.engine import Engine
from mpic_rag.model import Model
from mpic_rag.store import Store

SELECTORS = ("none", "first_k:32", "epic:8", "deviation:15%", "query:10%", "random:10%")
MODES = ("document", "isolated", "bare")
RESTORED = "full, documents restored"
METHODS = tuple(f"{mode}, {selector}" for mode in MODES for selector in SELECTORS)
Row = dict[str, Any]


def measure(
    model: Model,
    groups: Iterable[tuple[list[Document], list[Case]]],
    methods: Sequence[str],
    folder: str,
    name: str,
) -> Iterator[Row]:
    """Yield rows, one a case and method, full prefill's first.

    Its answer is the greedy one. The others are scored along it: KL is the mean over its tokens of
    KL(full prefill || method), agreement the share of them that the method would choose too. An
    answer is correct if the method would choose every token of the expected one, and then end.
    """
    store = Store(folder, adaptive=False)
    modes = sorted({method.partition(",")[0] for method in methods} | {"document"})
    engines = {mode: Engine(model, store, mode=cast(Mode, mode)) for mode in modes}
    for number, (pages, cases) in enumerate(groups):
        for engine in engines.values():
            engine.compile(pages)
        for case in cases:
            for row in _case(engines, case, methods):
                yield row | {"model": name, "group": number}
        store.dynamic.delete([row.key for row in store.dynamic.rows()])
    store.close()


def _case(engines: dict[str, Engine], case: Case, methods: Sequence[str]) -> Iterator[Row]:
    engine = engines["document"]
    model = engine.model
    limit = 48 if case.expected else ANSWER
    # Vision features come from the store: the same numbers, sooner.
    answer = engine.ask(case.question, case.chunks, selector="encoder", max_tokens=limit)
    stop = min(model.stop_ids)
    ended = len(answer.ids) < limit
    said = (*answer.ids, stop) if ended else answer.ids
    full, report = engine.score(case.question, case.chunks, said, "encoder")
    expected = (*model.codec.encode(case.expected), stop) if case.expected else ()

    def row(method: str, along: torch.Tensor, chunks: Sequence[Chunk], **facts: Any) -> Row:
        selector = facts.pop("selector")
        asked = engines[facts.pop("mode")]
        correct = None
        if expected:
            own = along if expected == said else None
            if own is None:
                own, _ = asked.score(case.question, chunks, expected, selector)
            correct = _chosen(model, own, expected)
        kl = (full.exp() * (full - along)).sum(-1)
        return {
            "method": method,
            "kind": case.kind,
            "split": case.split,
            "context": case.context,
            "question": case.question,
            "correct": correct,
            "kl": float(kl.mean()),
            "agreement": float((full.argmax(-1) == along.argmax(-1)).float().mean()),
            **facts,
        }

    share = {"context_tokens": report.context_tokens, "recomputed": 1.0, "scored": 0.0}
    yield row("full", full, case.chunks, mode="document", selector="encoder", **share)
    if case.context != "all":
        along, found = engine.score(case.question, case.restored, said, "encoder")
        share["context_tokens"] = found.context_tokens
        yield row(RESTORED, along, case.restored, mode="document", selector="encoder", **share)
    for method in methods:
        mode, _, selector = method.partition(", ")
        along, found = engines[mode].score(case.question, case.chunks, said, selector)
        yield row(
            method,
            along,
            case.chunks,
            mode=mode,
            selector=selector,
            context_tokens=found.context_tokens,
            recomputed=found.recomputed,
            scored=found.scored,
        )


def _chosen(model: Model, along: torch.Tensor, expected: Sequence[int]) -> bool:
    """Whether greedy steps give the expected tokens, of which the last one ends the answer."""
    best = along.argmax(-1).tolist()
    return tuple(best[:-1]) == tuple(expected[:-1]) and best[-1] in model.stop_ids
