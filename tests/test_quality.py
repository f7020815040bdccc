import json
import random
from statistics import fmean

import pytest

from mpic_rag import Engine, Model, Store
from mpic_rag.bench.quality import cases
from mpic_rag.bench.quality.measure import RESTORED, measure
from mpic_rag.bench.quality.summary import by_kind, interval, markdown, summarise, table
from mpic_rag.documents import orphans

METHODS = ("document, none", "isolated, none", "isolated, query:10%")


@pytest.fixture(scope="module")
def bundled():
    return Model.load()


@pytest.fixture(scope="module")
def measured(bundled, tmp_path_factory):
    """Every case of two small shelves, and its rows."""
    groups = list(cases.world(4, 12, seed=7))
    folder = tmp_path_factory.mktemp("quality")
    return groups, list(measure(bundled, groups, METHODS, str(folder), "bundled"))


def test_world_asks_all_kinds_and_tears_documents_apart():
    groups = list(cases.world(8, 30, seed=1))
    whole = [case for _, some in groups for case in some if case.context == "all"]
    torn = [case for _, some in groups for case in some if case.context == "orphans"]
    assert len(whole) == 30
    assert {case.kind for case in whole} == set(cases.KINDS)
    assert all(len(case.chunks) == 8 and not orphans(case.chunks) for case in whole)
    assert torn
    assert all(set(case.chunks) < set(case.restored) and orphans(case.chunks) for case in torn)
    again = [case.question for _, some in cases.world(8, 30, seed=1) for case in some]
    assert again == [case.question for _, some in groups for case in some]


def test_prose_prompts_are_what_they_claim():
    found = list(cases.prose(1000))
    assert len(found) == 120
    assert [case.kind for _, (case,) in found[:2]] == ["continuation", "question"]
    for pages, (case,) in found:
        sources = [page.name.rpartition("/")[0] for page in pages]
        assert len(set(sources)) == len(case.chunks) == 8
        if case.kind == "question":
            term = case.question.split('"')[1]
            assert sum(f'"{term}"' in chunk.text for chunk in case.chunks) == 1


def test_rows_agree_with_answers_that_are_really_given(bundled, measured, tmp_path):
    groups, rows = measured
    store = Store(tmp_path, adaptive=False)
    engines = {mode: Engine(bundled, store, mode=mode) for mode in ("document", "isolated")}
    found = {(r["question"], r["context"], r["method"]): r for r in rows}
    for pages, some in groups:
        for engine in engines.values():
            engine.compile(pages)
        for case in some:
            for method in METHODS:
                mode, _, selector = method.partition(", ")
                answer = engines[mode].ask(
                    case.question, case.chunks, selector=selector, max_tokens=48
                )
                row = found[case.question, case.context, method]
                assert row["correct"] == (answer.text == case.expected), case
                assert row["recomputed"] == answer.report.recomputed
            full = found[case.question, case.context, "full"]
            assert full["kl"] == 0
            assert full["agreement"] == 1


def test_summary_pairs_methods_with_full_prefill(measured):
    _, rows = measured
    (lines, torn) = (summarise(rows, context) for context in ("all", "orphans"))
    assert [line["method"] for line in lines] == ["full", *METHODS]
    assert [line["method"] for line in torn] == ["full", RESTORED, *METHODS]
    assert lines[0]["difference"] == 0
    assert lines[0]["accuracy_given_full"] == 1
    document, isolated = lines[1], lines[2]
    assert document["accuracy"] > isolated["accuracy"]
    assert document["kl"] < isolated["kl"]
    asked = sorted({row["kind"] for row in rows})
    kinds = [summarise(rows, "all", kind) for kind in (None, *asked)]
    assert sum(one[0]["questions"] for one in kinds[1:]) == kinds[0][0]["questions"]
    assert table(lines).row_count == by_kind(kinds).row_count == len(lines)
    page = markdown(lines).splitlines()
    assert len(page) == len(lines) + 2
    assert len({line.count("|") for line in page}) == 1


def test_intervals_agree_with_resampling():
    rng = random.Random(3)
    values = [rng.gauss(0.3, 2.0) for _ in range(400)]
    means = sorted(fmean(rng.choices(values, k=400)) for _ in range(2000))
    half = (means[-51] - means[50]) / 2
    assert interval(values, range(400)) == pytest.approx(half, rel=0.1)
    # Ten equal values tell as much as one.
    tens = [value for value in values for _ in range(10)]
    groups = [n for n in range(400) for _ in range(10)]
    assert interval(tens, groups) == pytest.approx(interval(values, range(400)), rel=1e-6)


def test_command_writes_tables_and_rows(mpic_rag, tmp_path):
    only = ("--method", "document, none", "--chunks", "4", "--questions", "5")
    status, out, _ = mpic_rag(
        "bench", "quality", *only, "--json", "rows.json", "--markdown", "page.md"
    )
    assert status == 0
    assert "document, none" in out
    lines = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {line["method"] for line in lines} == {"full", RESTORED, "document, none"}
    assert "| document, none | 0% |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "none"), "a mode of"),
        (("--method", "document, best"), "selector"),
        (("--chunks", "5"), "even"),
    ],
)
def test_command_says_what_is_wrong(mpic_rag, arguments, said):
    status, _, err = mpic_rag("bench", "quality", *arguments)
    assert status == 1
    assert said in err
