"""Blocks of rows see what one mask over everything lets them see."""

import pytest
import torch

from mpic_rag.kernels.slot_attention import blocked, blocks, reference, slot_attention


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_reference(monkeypatch, rows, block, seed):
    monkeypatch.setattr(blocked, "ROWS", block)
    draw = torch.Generator().manual_seed(seed)
    total = 80
    slots = torch.randperm(total, generator=draw)[:rows].sort().values
    queries = torch.randn(1, 4, rows, 8, generator=draw)
    keys, values = (torch.randn(1, 4, total, 8, generator=draw) for _ in range(2))
    keys[:, :, int(slots[-1]) + 1 :] = torch.nan  # what no row may look at
    values[:, :, int(slots[-1]) + 1 :] = torch.nan
    end = int(slots[-1]) + 1
    found = slot_attention(queries, keys, values, blocks(slots, torch.float32), 0.3)
    expected = reference.slot_attention(queries, keys[:, :, :end], values[:, :, :end], slots, 0.3)
    assert (found - expected).abs().max() < 1e-5


def test_a_block_looks_no_further_than_its_last_row(monkeypatch):
    monkeypatch.setattr(blocked, "ROWS", 2)
    plan = blocks(torch.tensor([0, 3, 4, 9]), torch.float32)
    assert [(b.first, b.last, b.end) for b in plan] == [(0, 2, 4), (2, 4, 10)]


def test_layers_of_every_family_attend_by_the_plan(model, shelf, make_engine, monkeypatch):
    """Also where one block is not all: a family may keep further keywords from its layers."""
    engine = make_engine(model)
    engine.compile(shelf)
    chunks = [chunk for document in shelf for chunk in document.chunks][::-1]
    whole = engine.ask("why?", chunks, selector="first_k:1", max_tokens=4).ids
    monkeypatch.setattr(blocked, "ROWS", 3)
    assert engine.ask("why?", chunks, selector="first_k:1", max_tokens=4).ids == whole
