"""Models that turn texts and pictures into vectors, by name or from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from mpic_rag.documents import Picture

BUNDLED_CLIP = Path(__file__).parents[1] / "data" / "clip"


class TextEmbedder(Protocol):
    """Texts to vectors; `name` changes whenever the vectors would."""

    name: str

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [texts, width] of what is searched."""
        ...

    def query(self, text: str) -> np.ndarray:
        """The vector [width] of a question."""
        ...


class SentenceEmbedder:
    """A model of sentence-transformers, such as `all-MiniLM-L6-v2`."""

    def __init__(self, name: str) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError("text embeddings need: pip install sentence-transformers") from error
        try:
            self._model: Any = SentenceTransformer(
                name, trust_remote_code=False, model_kwargs={"use_safetensors": True}
            )
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"can't load the text embedder {name}: {first}") from error
        self.name = f"sentence:{name}"

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [texts, width] of what is searched."""
        return self._model.encode_document(list(texts), show_progress_bar=False)

    def query(self, text: str) -> np.ndarray:
        """The vector [width] of a question."""
        return self._model.encode_query([text], show_progress_bar=False)[0]


class ClipEmbedder:
    """A model of open_clip: pictures and texts in one space.

    `name` is a folder with `open_clip_config.json` and safetensors weights, a hub name such as
    `hf-hub:timm/ViT-B-16-SigLIP`, or `architecture/weights` such as `ViT-B-32/laion2b_s34b_b79k`.
    """

    def __init__(self, name: str | Path = BUNDLED_CLIP) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise ValueError("picture embeddings need: pip install open-clip-torch") from error
        name = str(name)
        local = Path(name).is_dir()
        try:
            if local or ":" in name:
                source = f"local-dir:{name}" if local else name
                made = open_clip.create_model_and_transforms(source)
                self._tokenizer = open_clip.get_tokenizer(source)
            else:
                architecture, _, weights = name.partition("/")
                made = open_clip.create_model_and_transforms(architecture, weights or None)
                self._tokenizer = open_clip.get_tokenizer(architecture)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise ValueError(f"can't load the picture embedder {name}: {first}") from error
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model, self._preprocess = made[0].eval().to(self._device), made[2]
        self.name = f"clip:{_digest(Path(name)) if local else name}"

    @torch.inference_mode()
    def pictures(self, pictures: Sequence[Picture]) -> np.ndarray:
        """Vectors [pictures, width]."""
        pixels = torch.stack([self._preprocess(picture.decode()) for picture in pictures])
        vectors = self._model.encode_image(pixels.to(self._device), normalize=True)
        return vectors.float().cpu().numpy()

    @torch.inference_mode()
    def query(self, text: str) -> np.ndarray:
        """The vector [width] of a text; what is too long for the model is cut."""
        tokens = self._tokenizer([text]).to(self._device)
        return self._model.encode_text(tokens, normalize=True)[0].float().cpu().numpy()

    @cached_property
    def width(self) -> int:
        """Numbers in a vector."""
        return len(self.query("a"))


def _digest(folder: Path) -> str:
    """A folder's model by its content, wherever it lies."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".safetensors"}:
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
