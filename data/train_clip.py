"""Trains the bundled picture retriever: python data/train_clip.py [--out data/clip] [--steps 4000].

A small open_clip model that tells the world's signs and charts apart, for the demo and the tests
only; about 30 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor

from mpic_rag.data import words
from mpic_rag.data.pictures import draw_chart, draw_sign

HERE = Path(__file__).parent
TOKENIZER = HERE / "model"
BATCH = 128
POOL = 20_000  # pictures that are drawn, and shown again and again
CONFIG = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": 84,
            "patch_size": 14,
            "layers": 3,
            "width": 96,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 692,
            "width": 64,
            "heads": 4,
            "layers": 2,
            "hf_tokenizer_name": "bundled",
        },
    },
    "preprocess_cfg": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "squash",
    },
}
SIGNS = [
    *words.BY_SIGN,
    "{colour} {shape}",
    "a {colour} {shape} above the number {number}",
    "a sign with the number {number}",
    "number {number}",
    "the {shape}",
    "a {colour} sign",
    "a {colour} {shape} and {number}",
    "the sign shows {number}",
]
CHARTS = ["a chart", "the chart with the tallest bar in {tallest}", "{tallest} is the tallest bar"]


@dataclass(frozen=True)
class Shown:
    """What a picture shows."""

    facts: dict[str, str]

    def fits(self, asked: dict[str, str]) -> bool:
        """Whether a caption that says so fits the picture."""
        return all(self.facts.get(name) == value for name, value in asked.items())


def draw(rng: random.Random) -> tuple[object, Shown]:
    """A random picture and what it shows."""
    if rng.random() < 0.8:
        colour, shape = rng.choice(list(words.COLOURS)), rng.choice(words.SHAPES)
        number = rng.randint(10, 99)
        facts = {"kind": "sign", "colour": colour, "shape": shape, "number": str(number)}
        return draw_sign(rng, colour, shape, number), Shown(facts)
    colours = rng.sample(list(words.COLOURS), rng.randint(3, 5))
    return draw_chart(rng, colours), Shown({"kind": "chart", "tallest": colours[0]})


def caption(rng: random.Random, shown: Shown) -> tuple[str, dict[str, str]]:
    """A text about a picture, often inside a question, and what it says of the picture."""
    kind = shown.facts["kind"]
    template = rng.choice(SIGNS if kind == "sign" else CHARTS)
    asked = {name: value for name, value in shown.facts.items() if f"{{{name}}}" in template}
    text = template.format(**shown.facts)
    if rng.random() < 0.4:
        question = rng.choice(words.LOOKUPS[rng.choice(("keeper", "goods", "year"))])
        text = question.format(s=text)
    return text, {"kind": kind, **asked}


def loss(logits: Tensor, fits: Tensor) -> Tensor:
    """Each picture to all texts that fit it, and each text to all such pictures."""
    total = torch.zeros(())
    for scores, target in ((logits, fits), (logits.T, fits.T)):
        share = target / target.sum(dim=1, keepdim=True)
        total = total - (share * scores.log_softmax(dim=1)).sum(dim=1).mean() / 2
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "clip")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "open_clip_config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, args.out / name)
    source = f"local-dir:{args.out}"
    model, _, preprocess = open_clip.create_model_and_transforms(source, require_pretrained=False)
    tokenize = open_clip.get_tokenizer(source)
    drawn = [draw(rng) for _ in range(POOL)]
    pixels = torch.stack([preprocess(image) for image, _ in drawn])
    shown = [what for _, what in drawn]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, args.steps)
    for step in range(args.steps):
        chosen = [rng.randrange(POOL) for _ in range(BATCH)]
        texts, asked = zip(*(caption(rng, shown[i]) for i in chosen), strict=True)
        fits = torch.tensor([[shown[i].fits(a) for a in asked] for i in chosen], dtype=torch.float)
        pictures = model.encode_image(pixels[chosen], normalize=True)
        said = model.encode_text(tokenize(list(texts)), normalize=True)
        value = loss(model.logit_scale.exp() * pictures @ said.T, fits)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
        if step % 50 == 0:
            print(f"step {step}: loss {value.item():.3f}", flush=True)
        if step % 500 == 499 or step == args.steps - 1:
            weights = {k: v.half().contiguous() for k, v in model.state_dict().items()}
            save_file(weights, args.out / "open_clip_model.safetensors")
    model.eval()
    test = [draw(rng) for _ in range(400)]
    with torch.no_grad():
        tested = torch.stack([preprocess(image) for image, _ in test])
        found = model.encode_image(tested, normalize=True)
        texts, asked = zip(*(caption(rng, what) for _, what in test), strict=True)
        best = (model.encode_text(tokenize(list(texts)), normalize=True) @ found.T).argmax(dim=1)
    right = sum(test[i][1].fits(a) for i, a in zip(best.tolist(), asked, strict=True))
    print(f"the nearest of {len(test)} new pictures fits the text: {right / len(test):.3f}")


if __name__ == "__main__":
    main()
