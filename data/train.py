"""Trains the bundled model: python data/train.py --out data/model [--resume] [--seed 0].

The order of the stages matters: without it a model this small never binds a question to the
right station. First random sequences that repeat; then the world's own sentences about random
words, asked for by the word that they start with; then the world itself, texts and pictures, with
some of the former kept in; then more and more stations. All contexts are plain causal ones.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mpic_rag.data import architecture
from mpic_rag.data.fast import Muon, answer_logits, check, hidden_states
from mpic_rag.data.layout import Batch, Layout, collate
from mpic_rag.data.start import prepare
from mpic_rag.data.words import vocabulary
from mpic_rag.data.world import Question, make_shelf

QUESTIONS = 6  # turns after one context


@dataclass(frozen=True)
class Stage:
    """Sizes are (weight, stations, share of stations with a picture); it ends at its goals."""

    name: str
    steps: int
    sizes: tuple[tuple[float, int, float], ...]
    goals: tuple[tuple[str, float], ...] = ()
    tokens: int = 3000  # a batch
    decay: bool = False
    plain: float = 0.0  # share of pages whose every sentence names the station
    context: float = 0.0  # weight of the loss on the context's own text
    recall: float = 0.0  # share of batches of random word pairs
    copies: float = 0.0  # share of batches of random sequences that repeat


BOUND = tuple((k, 0.93) for k in ("text_lookup", "picture_number", "picture_lookup"))
HOPS = (*BOUND, ("picture_to_text", 0.9), ("text_to_picture", 0.9), ("comparison", 0.9))
FEW = ((0.15, 1, 1.0), (0.35, 2, 1.0), (0.4, 3, 1.0), (0.1, 4, 0.0))
SOME = ((0.1, 1, 1.0), (0.2, 2, 1.0), (0.3, 4, 1.0), (0.4, 6, 1.0))
MANY = ((0.2, 3, 1.0), (0.2, 6, 1.0), (0.5, 8, 1.0), (0.1, 12, 1.0))
LAST = ((0.1, 4, 1.0), (0.75, 8, 1.0), (0.15, 16, 1.0))
MIX = ((0.3, 3, 0.0), (0.1, 5, 0.0), (0.3, 1, 1.0), (0.2, 2, 1.0), (0.1, 3, 1.0))
STAGES = (
    Stage("copy", 500, (), (("copy", 0.95),), copies=1.0),
    Stage("recall", 900, (), (("recall_5", 0.9),), recall=1, copies=0.1),
    Stage("mix", 800, MIX, (), 2400, False, 0.5, 0.0, 0.3, 0.0),
    Stage("few", 600, FEW, HOPS, 2600, False, 0.1, 0.0, 0.1, 0.0),
    Stage("some", 600, SOME, HOPS),
    Stage("many", 600, MANY),
    Stage("last", 800, LAST, decay=True),
)
RATES = {"muon": 0.006, "adam": 1.2e-3}


def choose(rng: random.Random, questions: tuple[Question, ...], count: int) -> list[Question]:
    """Questions of all kinds, about equally many of each."""
    kinds: dict[str, list[Question]] = {}
    for question in questions:
        kinds.setdefault(question.kind, []).append(question)
    chosen: list[Question] = []
    while len(chosen) < count and kinds:
        kind = rng.choice(list(kinds))
        chosen.append(kinds[kind].pop())
        if not kinds[kind]:
            del kinds[kind]
    return chosen


def draw(rng: random.Random, layout: Layout, stage: Stage) -> Batch:
    """Contexts of one size, so that little is padded."""
    if rng.random() < stage.recall:
        return collate([layout.recall(rng, vocabulary()) for _ in range(20)], layout.pad)
    _, stations, share = rng.choices(stage.sizes, [s[0] for s in stage.sizes])[0]
    pictures = round(share * stations)
    budget, talks = stage.tokens, []
    while budget > 0:
        if stations == 1:
            texts = rng.choice((0, 1, 2)) if pictures else rng.choice((1, 2))
        elif pictures == stations:
            texts = rng.randint(stations - 1, stations + 1)
        else:
            texts = rng.randint(stations - pictures, stations - pictures // 2 + 2)
        shelf = make_shelf(rng, stations, pictures, texts, stage.plain)
        talks.append(layout.conversation(rng, shelf, choose(rng, shelf.questions, QUESTIONS)))
        budget -= len(talks[-1].ids)
    batch = collate(talks, layout.pad)
    batch.size = stations
    return batch


def copy_batch(rng: random.Random, tokens: list[int]) -> tuple[Tensor, int]:
    """Random sequences that repeat, and their period: short ones are learned first."""
    length = rng.choice((rng.randint(4, 12), rng.randint(8, 40)))
    times = max(2, 48 // length)
    rows = [rng.choices(tokens, k=length) * times for _ in range(2400 // (times * length))]
    return torch.tensor(rows), length


class Trainer:
    """The model, its optimisers and where in the stages it stands."""

    def __init__(self, out: Path, work: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.out, self.work, self.rng = out, work, random.Random(seed)
        self.coin = random.Random(seed + 1)  # draw() runs in another thread
        self.tokenizer = architecture.build_tokenizer()
        self.layout = Layout(self.tokenizer)
        self.model = Model(architecture.build_config(self.tokenizer)).float()
        prepare(self.model)
        self.bare, self.spaced = (
            torch.tensor([self.layout.encode(space + w)[0] for w in vocabulary()])
            for space in ("", " ")
        )
        self.as_bare = torch.arange(len(self.tokenizer))
        self.as_spaced = self.as_bare.clone()
        self.as_bare[self.spaced], self.as_spaced[self.bare] = self.bare, self.spaced
        self.model.get_input_embeddings().weight.data[self.spaced] += 0.1 * torch.randn(192)
        self._tie_spellings()
        matrices = [
            p
            for n, p in self.model.named_parameters()
            if p.ndim == 2 and "embed_tokens" not in n and "lm_head" not in n
        ]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimisers = {
            "muon": Muon(matrices, lr=RATES["muon"]),
            "adam": torch.optim.AdamW(
                others, lr=RATES["adam"], betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
        }
        self.stage = self.step = self.total = 0
        self.right: dict[str, float] = {}
        self.loss, self.seconds = 0.0, 0.0

    @torch.no_grad()
    def _tie_spellings(self) -> None:
        """A word with a space before it differs from the bare word by one shared direction.

        Answers start with bare words that the texts have with a space: what is learned about
        one spelling must hold for the other.
        """
        table = self.model.get_input_embeddings().weight
        bare, spaced = table[self.bare], table[self.spaced]
        middle, half = (bare + spaced) / 2, (spaced - bare).mean(dim=0) / 2
        table[self.bare], table[self.spaced] = middle - half, middle + half

    def save(self, name: str = "last.pt") -> None:
        """Keeps what `--resume` needs."""
        self.work.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {k: o.state_dict() for k, o in self.optimisers.items()}
        state |= {"model": self.model.state_dict(), "rng": self.rng.getstate()}
        state |= {k: getattr(self, k) for k in ("stage", "step", "total", "right", "seconds")}
        torch.save(state, self.work / (name + ".new"))
        (self.work / (name + ".new")).replace(self.work / name)

    def resume(self) -> None:
        """Goes on from the last checkpoint."""
        state = torch.load(self.work / "last.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        for key, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state[key])
        self._tie_spellings()
        self.rng.setstate(state["rng"])
        for key in ("stage", "step", "total", "right", "seconds"):
            setattr(self, key, state[key])

    def export(self) -> None:
        """Writes the model as `from_pretrained` reads it."""
        self.out.mkdir(parents=True, exist_ok=True)
        export(self.model, self.tokenizer, self.out)

    def _update(self, loss: Tensor, decay: float) -> None:
        warm = min(1.0, (self.step + 1) / 40)  # each stage begins with a shock
        for key, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = RATES[key] * decay * warm
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.optimisers["adam"].param_groups[0]["params"], 1.0)
        for optimiser in self.optimisers.values():
            optimiser.step()
        self._tie_spellings()
        self.loss = 0.95 * self.loss + 0.05 * loss.item() if self.loss else loss.item()

    def _note(self, kind: str, right: float, weight: float) -> None:
        self.right[kind] = self.right.get(kind, 0.0) * (1 - weight) + weight * right

    def _copy_step(self, tokens: list[int]) -> None:
        ids, period = copy_batch(self.coin, tokens)
        for start in range(0, ids.shape[1], period):  # often in another spelling, as answers are
            table = self.coin.choice((self.as_bare, self.as_spaced))
            ids[:, start : start + period] = table[ids[:, start : start + period]]
        positions = torch.arange(ids.shape[1]).expand(3, len(ids), -1)
        embeds = self.model.get_input_embeddings()(ids)
        hidden = hidden_states(self.model, embeds, positions)[:, period:-1]
        logits, target = self.model.lm_head(hidden).flatten(0, 1), ids[:, period + 1 :].flatten()
        self._note("copy", float((logits.argmax(-1) == target).float().mean()), 0.1)
        self._update(F.cross_entropy(logits, target), 1.0)

    def _answer_step(self, batch: Batch, stage: Stage) -> None:
        count, flat = len(batch.target_places), batch.ids.flatten()
        places = batch.target_places
        if stage.context:
            places = torch.cat((places, batch.context_places))
        every = answer_logits(self.model, batch, places)
        logits, targets = every[:count], flat[batch.target_places]
        hits = (logits.argmax(-1) == targets).tolist()
        for first, end, kind in batch.answers:
            self._note(kind, float(all(hits[first:end])), 0.01)
            if stage.sizes and kind == "text_lookup":
                self._note(f"{kind}@{batch.size}", float(all(hits[first:end])), 0.02)
        loss = F.cross_entropy(logits, targets)
        if stage.context:
            loss = loss + stage.context * F.cross_entropy(every[count:], flat[places[count:]])
        self._update(loss, self._decay(stage))

    def _line(self, stage: Stage) -> str:
        kinds = " ".join(f"{k}={v:.3f}" for k, v in sorted(self.right.items()))
        return (
            f"{self.seconds / 60:6.1f} min  {stage.name} {self.step}  total {self.total}  "
            f"loss {self.loss:.4f}  {kinds}"
        )

    def run(self) -> None:
        """All stages that are left."""
        tokens = [
            t for w in vocabulary() for t in self.layout.encode(w) + self.layout.encode(" " + w)
        ]
        tokens += [self.layout.encode(d)[0] for d in "0123456789,.:?"]
        probe = draw(random.Random(1), self.layout, Stage("", 0, ((1, 2, 1.0),), tokens=1))
        print(f"difference to transformers: {check(self.model, probe):.2e}", flush=True)
        if check(self.model, probe) > 1e-3:
            raise RuntimeError("the fast forward pass does not match transformers")
        saved = time.time()
        with ThreadPoolExecutor(1) as pool:
            while self.stage < len(STAGES):
                stage = STAGES[self.stage]
                queue: list[Future[Batch]] = []
                while self.step < stage.steps:
                    began = time.time()
                    if self.coin.random() < stage.copies:
                        self._copy_step(tokens)
                    else:
                        self._answer_step(self._next(pool, queue, stage), stage)
                    self.step, self.total = self.step + 1, self.total + 1
                    self.seconds += time.time() - began
                    if self.step % 20 == 0:
                        print(self._line(stage), flush=True)
                    if time.time() - saved > 45:
                        self.save()
                        saved = time.time()
                    if self.step >= 40 and stage.goals and self._reached(stage):
                        break
                for future in queue:
                    future.result()
                print(f"done: {self._line(stage)}", flush=True)
                self.stage, self.step, self.right, self.loss = self.stage + 1, 0, {}, 0.0
                self.save()
                self.save(f"{stage.name}.pt")
                if self.stage >= 4:
                    self.export()

    def _next(self, pool: ThreadPoolExecutor, queue: list[Future[Batch]], stage: Stage) -> Batch:
        while len(queue) < 2:
            queue.append(pool.submit(draw, self.rng, self.layout, stage))
        return queue.pop(0).result()

    def _decay(self, stage: Stage) -> float:
        return max(0.03, 1 - self.step / stage.steps) if stage.decay else 1.0

    def _reached(self, stage: Stage) -> bool:
        return all(self.right.get(kind, 0.0) >= goal for kind, goal in stage.goals)


def export(model: Model, tokenizer: architecture.PreTrainedTokenizerFast, out: Path) -> None:
    """Saves in bfloat16, without touching the model being trained."""
    copy = Model(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    architecture.build_processor(tokenizer).save_pretrained(out)
    architecture.generation_config(tokenizer).save_pretrained(out)
    json.loads((out / "config.json").read_text())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/model"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/train"), help="checkpoints")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start", type=Path, help="an exported model to go on from")
    parser.add_argument("--stage", default=STAGES[0].name, help="where to go on with --start")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trainer = Trainer(args.out, args.work, args.seed)
    if args.start:
        saved = Model.from_pretrained(args.start, dtype=torch.float32)
        trainer.model.load_state_dict(saved.state_dict())
        trainer.stage = [stage.name for stage in STAGES].index(args.stage)
    if args.resume:
        trainer.resume()
    trainer.run()
    trainer.export()


if __name__ == "__main__":
    main()
