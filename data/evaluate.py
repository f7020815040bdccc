"""Measures a saved model through `transformers` alone: python data/evaluate.py data/model.

One question a context, plain full prefill, greedy answers of the model as it was saved
(bfloat16 weights, computed in float32).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Cache

from mpic_rag.data.words import SYSTEM
from mpic_rag.data.world import KINDS, Question, Shelf, make_shelf


class Reader:
    """A saved model and its own processor."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.stop = self.model.generation_config.eos_token_id

    def _ids(self, text: str) -> list[int]:
        return self.processor.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def answers(self, shelf: Shelf, questions: list[Question], order: list[int]) -> list[str]:
        """Greedy answers; the context is computed once and each question goes on from it."""
        ids = self._ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        pictures = []
        for page in order:
            for chunk in shelf.pages[page].chunks:
                for part in chunk:
                    if isinstance(part, str):
                        ids += self._ids(part)
                        continue
                    pictures.append(part)
                    grid = self.processor.image_processor(images=[part], return_tensors="pt")
                    count = int(grid["image_grid_thw"].prod()) // 4
                    ids += self._ids(
                        "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"
                    )
                ids += self._ids("\n")
        inputs = {}
        if pictures:
            inputs = dict(self.processor.image_processor(images=pictures, return_tensors="pt"))
        context = torch.tensor([ids])
        is_picture = (context == self.model.config.image_token_id).int()
        shared = self.model(
            input_ids=context,
            attention_mask=torch.ones_like(context),
            mm_token_type_ids=is_picture,
            use_cache=True,
            **inputs,
        )
        cache, length = shared.past_key_values, len(ids)
        delta = int(self.model.model.rope_deltas.flatten()[0])
        return [self._continue(cache, length, delta, q.text) for q in questions]

    def _continue(self, cache: Cache, length: int, delta: int, question: str) -> str:
        turn = self._ids(question) + self._ids("<|im_end|>\n<|im_start|>assistant\n")
        answer: list[int] = []
        place = length
        while len(answer) < 48:
            positions = torch.arange(place, place + len(turn)).view(1, 1, -1) + delta
            out = self.model(
                input_ids=torch.tensor([turn]),
                position_ids=positions.expand(3, 1, -1),
                cache=cache,
                use_cache=True,
            )
            place += len(turn)
            turn = [int(out.logits[0, -1].argmax())]
            if turn[0] == self.stop:
                break
            answer += turn
        cache.crop(length - place)  # a negative count: what this question added
        return self.processor.tokenizer.decode(answer)


def measure(
    reader: Reader, stations: int, contexts: int, seed: int
) -> Iterator[tuple[Question, bool]]:
    """Three questions of each kind, as far as there are, about fresh shelves."""
    rng = random.Random(seed)
    for _ in range(contexts):
        shelf = make_shelf(rng, stations, stations, stations)
        chosen = []
        for kind in KINDS:
            chosen += [q for q in shelf.questions if q.kind == kind][:3]
        order = rng.sample(range(stations), stations)
        for question, answer in zip(chosen, reader.answers(shelf, chosen, order), strict=True):
            yield question, answer == question.answer


def main() -> None:
    """Command line: prints accuracy and count per kind, split and not split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stations", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=70)
    parser.add_argument("--seed", type=int, default=123456)
    args = parser.parse_args()
    results: dict[tuple[str, str], list[bool]] = {}
    reader = Reader(args.model)
    for question, right in measure(reader, args.stations, args.contexts, args.seed):
        for kind in (question.kind, "all"):
            for part in ("all", "split" if question.split else "not split"):
                results.setdefault((kind, part), []).append(right)
    print(f"| {args.stations} stations | all | split | not split |\n|---|---|---|---|")
    for kind in (*KINDS, "all"):
        cells = []
        for part in ("all", "split", "not split"):
            hits = results.get((kind, part), [])
            cells.append(f"{sum(hits) / len(hits):.3f} ({len(hits)})" if hits else "-")
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
