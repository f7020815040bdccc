import pytest
import torch
from tiny import tiny

from mpic_rag import Model, linker, selftest


def test_every_family_passes(model):
    assert selftest.fault(model) == ""


def test_the_bundled_model_passes_in_half_precision():
    assert selftest.fault(Model.load(dtype=torch.bfloat16)) == ""


def _stale(monkeypatch):
    """Keys stay rotated to where they were compiled."""
    rerotate = linker.rerotate
    monkeypatch.setattr(
        linker, "rerotate", lambda keys, cos, sin: rerotate(keys, cos[:1] * 0 + 1, sin[:1] * 0)
    )


def test_stale_positions_are_caught_and_prompts_computed_in_full(make_engine, shelf, monkeypatch):
    broken = tiny("llama")
    with monkeypatch.context() as patch:
        _stale(patch)
        with pytest.warns(UserWarning, match="keys of layer 0 are .* off; every prompt"):
            engine = make_engine(broken)
    page = next(d for d in shelf if all(isinstance(p, str) for c in d.chunks for p in c.parts))
    engine.compile([page])
    answer = engine.ask("why?", page.chunks, selector="none", max_tokens=2)
    assert answer.report.selector == "full"
    assert answer.report.recomputed == 1
