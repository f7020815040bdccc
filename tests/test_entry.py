"""An entry's bytes: what was written comes back, and whatever was changed is noticed."""

import json
import random

import pytest
import torch
from safetensors.torch import load

from mpic_rag.segment import ChunkKV, Segment
from mpic_rag.store.archive import reader
from mpic_rag.store.entry import Entry, StoreError, encode

KEY = "ab" * 32


def sample(tokens=9, dtype=torch.float32, layers=3, seed=0):
    """A chunk KV of random numbers, with four image tokens."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.zeros(tokens, dtype=torch.int32)
    images[2:6] = 1
    segment = Segment(
        torch.arange(tokens) * 7,
        torch.arange(3 * tokens).view(3, tokens),
        images,
        torch.randn(4, 12, generator=draw).to(dtype),
    )
    keys, values = torch.randn(2, layers, 2, tokens, 8, generator=draw).to(dtype)
    return ChunkKV(segment, keys, values)


def opened(data, key=KEY):
    return Entry(key, reader(data), "disk")


def same(kv, other):
    tensors = [(kv.keys, other.keys), (kv.values, other.values)]
    tensors += [
        (a, b) for a, b in zip(vars(kv.segment).values(), vars(other.segment).values(), strict=True)
    ]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_round_trip(dtype, tokens):
    kv = sample(max(tokens, 6), dtype)
    data, _ = encode(KEY, kv, {"source": "amber#1"})
    entry = opened(data)
    assert same(entry.kv(features=True), kv)
    assert entry.facts["source"] == "amber#1"
    assert entry.size == len(data)
    assert entry.raw() == data


def test_a_layer_is_one_contiguous_range_that_safetensors_reads_too():
    kv = sample()
    data, _ = encode(KEY, kv, {})
    tensors = load(data)
    for n in range(3):
        keys, values = tensors[f"layer.{n}"].view(torch.float32).view(2, *kv.keys.shape[1:])
        assert torch.equal(keys, kv.keys[n])
        assert torch.equal(values, kv.values[n])


def test_layers_of_a_large_entry_are_read_one_by_one():
    kv = sample(tokens=20_000)
    data, _ = encode(KEY, kv, {})
    ranges = []
    read = reader(data)
    entry = Entry(KEY, lambda a, b: ranges.append((a, b)) or read(a, b), "disk")
    keys, values = entry.layer(2)
    assert torch.equal(keys, kv.keys[2])
    assert torch.equal(values, kv.values[2])
    assert sum(b - a for a, b in ranges) < len(data)


def test_every_cut_is_noticed():
    data, _ = encode(KEY, sample(), {})
    for length in [0, 1, 7, 8, 9, 50, *range(100, len(data), 97), len(data) - 1]:
        with pytest.raises(StoreError):
            opened(data[:length]).verify()


@pytest.mark.parametrize("int8", [False, True])
def test_every_flipped_bit_is_noticed(int8):
    data, _ = encode(KEY, sample(), {}, int8)
    draw = random.Random(0)
    for _ in range(1000):
        broken = bytearray(data)
        broken[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        with pytest.raises(StoreError):
            opened(bytes(broken)).verify()


def test_another_keys_entry_and_another_format():
    data, _ = encode(KEY, sample(), {})
    with pytest.raises(StoreError, match="another key"):
        opened(data, "cd" * 32)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'{"__metadata__": 7}',
        b'{"__metadata__": {"header": "' + b"0" * 32 + b'"}}',
        b'{"__metadata__": {"mpic_rag": "[[[[[[[[", "header": "' + b"a" * 32 + b'"}}',
        b"[" * 200_000,
        b"\xff\xfe",
    ],
)
def test_hostile_headers(header):
    with pytest.raises(StoreError):
        opened(len(header).to_bytes(8, "little") + header)


def test_a_forged_header_is_bounded_by_what_is_there():
    """Checksums stop accidents, not forgers: those get an error, never memory that isn't there."""
    import xxhash

    data, about = encode(KEY, sample(), {})
    length = int.from_bytes(data[:8], "little")
    for change in (
        {"shape": [3, 2, 1 << 50, 8]},
        {"shape": [1 << 40, 2, 9, 8]},
        {"shape": []},
        {"axes": -1},
        {"features": [1 << 40, 12]},
        {"dtype": "F8"},
        {"format": 99},
        {"key": "../../x"},
        {"checksums": {}},
    ):
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"] = {"mpic_rag": json.dumps(about | change), "header": "0" * 32}
        text = json.dumps(header).encode()
        seal = xxhash.xxh3_128_hexdigest(text)
        text = text.replace(b'"header": "' + b"0" * 32, f'"header": "{seal}'.encode())
        forged = len(text).to_bytes(8, "little") + text + data[8 + length :]
        with pytest.raises(StoreError):
            opened(forged).kv(features=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_keeps_numbers_beside_a_large_bias(dtype):
    """Real Qwen2.5 key projections have biases like this one; without zero points they'd drown."""
    kv = sample(64, dtype)
    kv.keys[..., 3] += 100
    kv.keys[..., 5] -= 300
    data, _ = encode(KEY, kv, {}, int8=True)
    found = opened(data).kv(features=True)
    plain, _ = encode(KEY, kv, {})
    assert torch.equal(found.segment.features, kv.segment.features)
    assert (found.values.float() - kv.values.float()).abs().max() < 0.03
    spread = kv.keys.float().amax(2) - kv.keys.float().amin(2)
    step = (spread / 255 + 0.004)[:, :, None]
    rounding = 1.0 if dtype == torch.bfloat16 else 0.0  # of bfloat16 itself at 300
    assert ((found.keys.float() - kv.keys.float()).abs() <= step + rounding).all()
    assert len(data) < len(plain)


def test_int8_is_about_half_of_bfloat16():
    torch.manual_seed(0)
    segment = sample(300).segment
    keys, values = torch.randn(2, 4, 2, 300, 64).bfloat16()
    sizes = [len(encode(KEY, ChunkKV(segment, keys, values), {}, i)[0]) for i in (False, True)]
    assert 0.5 < sizes[1] / sizes[0] < 0.56


def test_int8_refuses_what_it_cannot_hold():
    kv = sample()
    kv.values[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="too large"):
        encode(KEY, kv, {}, int8=True)
