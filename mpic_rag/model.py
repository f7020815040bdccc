"""The only file that knows transformers' models: loading, refusing, embedding, running."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Cache,
)

from mpic_rag import attention
from mpic_rag.documents import Part, Picture
from mpic_rag.families import UnsupportedModelError, check
from mpic_rag.kernels.slot_attention import blocks
from mpic_rag.segment import Segment
from mpic_rag.tokens import Codec

BUNDLED = Path(__file__).parent / "data" / "model"


# Keys of a config that say where it came from, or repeat what the weights say.
_NOT_CONTENT = {"_name_or_path", "architectures", "dtype", "transformers_version"}


class Model:
    """A loaded model; tensors carry no batch dimension: [tokens, hidden], [heads, tokens, dim]."""

    def __init__(self, network: Any, tokenizer: Any, image_processor: Any = None) -> None:
        self.family = check(network.config)
        self.network = network.eval()
        # Where the weights are and of which type, and so keys and values; transformers' own
        # properties look for them among all modules, each time.
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        self.codec = Codec(tokenizer)
        self.image_processor = image_processor
        # One pass at a time, whoever shares this model: compiling hooks into its layers.
        self.lock = threading.Lock()
        self._counted: dict[str, int] = {}  # a picture's tokens, by its digest
        self.decoder = attrgetter(self.family.decoder)(network)
        config = self.decoder.config
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.max_tokens: int = config.max_position_embeddings

    @classmethod
    def load(
        cls,
        name: str | Path = BUNDLED,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Model:
        """Load a folder, a GGUF file or a hub name; raises `ValueError` with cause and cure.

        The default device is the accelerator, where there is one; the default dtype is bfloat16
        there and float32 on a CPU, many of which have no fast bfloat16.
        """
        if device is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            device = found if found is not None else torch.device("cpu")
        device = torch.device(device)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        source, options = locate(name)
        try:
            config = AutoConfig.from_pretrained(source, **options)
            family = check(config)
            auto = AutoModelForImageTextToText if family.markers else AutoModelForCausalLM
            # Weights come as safetensors or GGUF: pickled ones could run code.
            network = auto.from_pretrained(source, dtype=dtype, use_safetensors=True, **options).to(
                device
            )
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            images = AutoImageProcessor.from_pretrained(source) if family.markers else None
        except UnsupportedModelError:
            raise
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise ValueError(
                f"can't load the model {name}: {first} (--model takes a folder that"
                " `save_pretrained` wrote, a .gguf file (with the extra `gguf`), or a name on the"
                " Hugging Face hub)"
            ) from error
        return cls(network, tokenizer, images)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of weights, config, tokenizer and image processor: equal means equal KV."""
        digest = xxhash.xxh3_128()
        for name, tensor in self.network.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(data.numpy())
        config = _content(self.network.config.to_dict())
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        digest.update(self.codec.spec.encode())
        if self.image_processor is not None:
            digest.update(self.image_processor.to_json_string().encode())
        return digest.hexdigest()

    @cached_property
    def attention_share(self) -> float:
        """What looking at one slot costs, in tokens' ways through all weights (by FLOPs)."""
        weights = sum(p.numel() for p in self.decoder.layers.parameters())
        heads = self.decoder.config.num_attention_heads
        return 4 * heads * self.head_dim * self.layers / (2 * weights)

    def work(self, slots: torch.Tensor) -> float:
        """What computing tokens at `slots` [tokens] costs, as so many tokens that see nothing."""
        return len(slots) + self.attention_share * float((slots + 1).sum())

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        stop = self.network.generation_config.eos_token_id
        stop = stop if isinstance(stop, list) else [stop]
        return frozenset({*stop, self.codec.tokenizer.eos_token_id} - {None})

    def text_segment(self, ids: Sequence[int]) -> Segment:
        """Lay out token ids that hold no picture."""
        return self._layout([(list(ids), None)])

    def segments(
        self, groups: Sequence[Sequence[Part | tuple[int, ...]]], end: str = "\n"
    ) -> list[Segment]:
        """Lay out each group of parts, all pictures in one pass through the vision tower.

        Image markers belong to the part, and `end` to the group: that is the whole rule for
        template glue, so a chunk is the same tokens whatever stands beside it. Tuples are token
        ids, of the chat template.
        """
        pictures = {p.digest: p for parts in groups for p in parts if isinstance(p, Picture)}
        features = dict(zip(pictures, self.features(list(pictures.values())), strict=True))
        tail = self.codec.encode(end) if end else []
        return [
            self._layout(
                [
                    ([], features[part.digest])
                    if isinstance(part, Picture)
                    else (self.codec.encode(part) if isinstance(part, str) else [*part], None)
                    for part in parts
                ]
                + [(tail, None)]
            )
            for parts in groups
        ]

    def count(self, part: Part) -> int:
        """Tokens that a part takes; a picture is scaled for that, but not looked at."""
        if isinstance(part, str):
            return len(self.codec.encode(part))
        if part.digest not in self._counted:
            ((height, width),) = self._sizes(self._pixels([part]))
            markers = self.family.markers or ()
            around = sum(len(self.codec.control(marker)) for marker in markers)
            self._counted[part.digest] = height * width + around
        return self._counted[part.digest]

    @torch.inference_mode()
    def features(self, pictures: Sequence[Picture]) -> list[tuple[torch.Tensor, tuple[int, int]]]:
        """Run the vision tower; per picture its rows [image tokens, hidden] and (height, width)."""
        if not pictures:
            return []
        pixels = self._pixels(pictures)
        outputs = self.network.get_image_features(**pixels, return_dict=True).pooler_output
        sizes = self._sizes(pixels)
        return list(zip((rows.to(self.dtype) for rows in outputs), sizes, strict=True))

    def _pixels(self, pictures: Sequence[Picture]) -> Any:
        if self.family.markers is None:
            raise ValueError("this model reads texts only; choose a vision-language model")
        images = [picture.decode() for picture in pictures]
        try:
            return self.image_processor(images=images, return_tensors="pt").to(self.device)
        except ValueError as error:
            names = ", ".join(picture.name for picture in pictures)
            raise ValueError(f"the model can't take the picture {names}: {error}") from error

    def _sizes(self, pixels: Any) -> list[tuple[int, int]]:
        """Rows and columns of each picture's tokens."""
        if "image_grid_thw" in pixels:
            merge = self.image_processor.merge_size
            return [(h // merge, w // merge) for _, h, w in pixels["image_grid_thw"].tolist()]
        config = self.network.config
        count, _, height, width = pixels["pixel_values"].shape
        patch = config.vision_config.patch_size
        whole = config.vision_feature_select_strategy == "full"  # with the class token
        return [(1, (height // patch) * (width // patch) + whole)] * count

    def embed(self, segment: Segment, rows: torch.Tensor) -> torch.Tensor:
        """Input embeddings [rows, hidden] of the chosen rows, image features in their places."""
        embeds = self.decoder.get_input_embeddings()(segment.ids[rows].to(self.device))
        images = segment.images[rows] > 0
        if images.any():
            index = (segment.images > 0).cumsum(0)[rows][images] - 1
            embeds[images.to(self.device)] = segment.features[index].to(embeds)
        return embeds

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, dim] at positions [axes, tokens], from the model's module."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.decoder.rotary_emb(like, self._position_ids(positions))
        return cos[0], sin[0]

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the text model; returns hidden states [tokens, hidden] and writes the cache.

        embeds [tokens, hidden], positions [axes, tokens]. Each token sees the slots up to its own
        in `slots` [tokens]; None stands for a whole prompt, or its last token alone.
        """
        inputs = {
            "inputs_embeds": embeds[None],
            "position_ids": self._position_ids(positions),
            "cache": cache,
            "use_cache": True,
        }
        if slots is None:
            return self.decoder(**inputs).last_hidden_state[0]
        with attention.planned(self.decoder.config, blocks(slots, self.dtype)) as mask:
            return self.decoder(**inputs, attention_mask=mask).last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [tokens, vocabulary] in float32."""
        return self.network.get_output_embeddings()(hidden).float()

    @contextmanager
    def captured_keys(self) -> Iterator[list[torch.Tensor]]:
        """Collect each layer's keys before RoPE, [heads, tokens, dim], while inside."""
        keys: list[torch.Tensor] = []

        def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            keys.append(output[0].unflatten(-1, (self.kv_heads, self.head_dim)).transpose(0, 1))

        hooks = [
            layer.self_attn.k_proj.register_forward_hook(keep) for layer in self.decoder.layers
        ]
        try:
            yield keys
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def watched(watch: attention.Watch) -> AbstractContextManager[None]:
        """Show `watch` what each layer attends with, in passes over some rows of a prompt."""
        return attention.watched(watch)

    @contextmanager
    def only_layers(self, count: int) -> Iterator[None]:
        """Let `forward` pass through the first layers only, while inside."""
        layers = self.decoder.layers
        self.decoder.layers = layers[:count]
        try:
            yield
        finally:
            self.decoder.layers = layers

    def _position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        positions = positions.to(self.device)
        return positions[:, None] if self.family.axes > 1 else positions

    def _layout(
        self, parts: Sequence[tuple[list[int], tuple[torch.Tensor, tuple[int, int]] | None]]
    ) -> Segment:
        """Join token runs and pictures; text after a picture starts at its largest position + 1."""
        ids: list[int] = []
        images: list[int] = []
        positions: list[torch.Tensor] = []
        features: list[torch.Tensor] = []
        start = 0

        def text(run: list[int]) -> None:
            nonlocal start
            ids.extend(run)
            images.extend([0] * len(run))
            positions.append(torch.arange(start, start + len(run)).repeat(self.family.axes, 1))
            start += len(run)

        for run, picture in parts:
            if picture is None:
                text(run)
                continue
            assert self.family.markers is not None
            before, after = map(self.codec.control, self.family.markers)
            rows, (height, width) = picture
            text(before)
            ids.extend([self.network.config.image_token_id] * len(rows))
            images.extend([len(features) + 1] * len(rows))
            features.append(rows)
            if self.family.axes == 1:
                grid = torch.arange(len(rows))[None]
            else:
                t, y, x = torch.meshgrid(
                    *(torch.arange(n) for n in (1, height, width)), indexing="ij"
                )
                grid = torch.stack([t, y, x]).flatten(1)
            positions.append(grid + start)
            start += int(grid.max()) + 1
            text(after)
        width = self.decoder.config.hidden_size
        none = torch.empty(0, width, dtype=self.dtype, device=self.device)
        return Segment(
            torch.tensor(ids, dtype=torch.long),
            torch.cat(positions, 1),
            torch.tensor(images, dtype=torch.int32),
            torch.cat(features) if features else none,
        )


def locate(name: str | Path) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` wants to be told of a folder, a GGUF file or a hub name."""
    if str(name).endswith(".gguf"):
        return str(Path(name).parent), {"gguf_file": Path(name).name}
    return str(name), {}


def _content(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _content(value) for key, value in config.items() if key not in _NOT_CONTENT}
