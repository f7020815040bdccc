"""Rows to figures: means, and differences to full prefill on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from statistics import fmean, stdev

from rich.table import Table

from mpic_rag.bench.quality.measure import Row

Z = 1.96  # a normal distribution's 95 %
CLUSTERED = "group"  # questions about one shelf share its chunks


def interval(values: Sequence[float], groups: Sequence[int]) -> float:
    """Half of a mean's 95 % interval, where values of one group may hang together."""
    mean = fmean(values)
    sums: dict[int, float] = {}
    for value, group in zip(values, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + value - mean
    if len(sums) < 2:
        return float("nan")
    return Z * stdev(sums.values()) * len(sums) ** 0.5 / len(values)


def summarise(rows: Sequence[Row], context: str, kind: str | None = None) -> list[Row]:
    """One line a method."""
    mine = [r for r in rows if r["context"] == context and kind in (None, r["kind"])]
    by: dict[str, list[Row]] = {}
    for r in mine:
        by.setdefault(r["method"], []).append(r)
    full = by.get("full", [])
    lines = []
    for method, some in by.items():
        groups = [r[CLUSTERED] for r in some]
        line: Row = {
            "method": method,
            "kind": kind or "all",
            "context": context,
            "questions": len(some),
            "context_tokens": fmean(r["context_tokens"] for r in some),
            "recomputed": fmean(r["recomputed"] for r in some),
            "scored": fmean(r["scored"] for r in some),
            "kl": fmean(r["kl"] for r in some),
            "kl_interval": interval([r["kl"] for r in some], groups),
            "agreement": fmean(r["agreement"] for r in some),
        }
        if some[0]["correct"] is not None:
            pairs = list(zip(some, full, strict=True))
            apart = [float(a["correct"]) - float(b["correct"]) for a, b in pairs]
            given = [float(a["correct"]) for a, b in pairs if b["correct"]]
            line |= {
                "accuracy": fmean(float(r["correct"]) for r in some),
                "accuracy_given_full": fmean(given) if given else None,
                "difference": fmean(apart),
                "difference_interval": interval(apart, groups),
            }
        lines.append(line)
    return lines


def table(lines: Sequence[Row]) -> Table:
    """Lines of one context and kind."""
    first = lines[0]
    judged = "accuracy" in first
    title = f"{first['context']}, {first['kind']}: {first['questions']} questions"
    made = Table(title=f"{title}, {first['context_tokens']:.0f} tokens")
    made.add_column("method", no_wrap=True)
    for name, _ in _columns(judged):
        made.add_column(name, justify="right", no_wrap="over" in name or name == "KL")
    for line in lines:
        made.add_row(line["method"], *(show(line) for _, show in _columns(judged)))
    return made


def markdown(lines: Sequence[Row]) -> str:
    """The same for a page."""
    columns = _columns("accuracy" in lines[0])
    names = ["method", *(name for name, _ in columns)]
    rows = [[line["method"], *(show(line) for _, show in columns)] for line in lines]
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in [names, ["---"] * len(names), *rows]
    )


def _columns(judged: bool) -> list[tuple[str, Callable[[Row], str]]]:
    right: list[tuple[str, Callable[[Row], str]]] = [
        ("accuracy", lambda r: f"{r['accuracy']:.3f}"),
        ("where full is right", lambda r: _number(r["accuracy_given_full"])),
        (
            "points over full",
            lambda r: (
                f"{100 * r['difference']:+.1f}{_plus_minus(100 * r['difference_interval'], 1)}"
            ),
        ),
    ]
    return [
        ("recomputed", lambda r: f"{r['recomputed']:.0%}"),
        *(right if judged else []),
        ("KL", lambda r: f"{r['kl']:.4f}{_plus_minus(r['kl_interval'], 4)}"),
        ("same token", lambda r: f"{r['agreement']:.3f}"),
    ]


def by_kind(tables: Sequence[Sequence[Row]]) -> Table:
    """Accuracy, or KL where nothing else is known, of one context: a column a kind."""
    judged = "accuracy" in tables[0][0]
    made = Table(title=f"{tables[0][0]['context']}, {'accuracy' if judged else 'KL'} by kind")
    made.add_column("method", no_wrap=True)
    for lines in tables:
        made.add_column(lines[0]["kind"].replace("_", "\n"), justify="right")
    for same in zip(*tables, strict=True):
        values = [f"{r['accuracy']:.3f}" if judged else f"{r['kl']:.4f}" for r in same]
        made.add_row(same[0]["method"], *values)
    return made


def _plus_minus(half: float, digits: int) -> str:
    return "" if isnan(half) else f" ± {half:.{digits}f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
