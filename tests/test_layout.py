"""The folder layout, which packaging and transformers' own imports depend on."""

from pathlib import Path

import mpic_rag

ROOT = Path(__file__).resolve().parent.parent


def test_kernels_dir_cannot_shadow_hf_kernels():
    """transformers imports any top-level `kernels` package as its own dependency."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_top_level_folders_are_linked_into_the_package():
    for name in ("kernels", "retrievers", "data"):
        link = ROOT / "mpic_rag" / name
        assert link.is_symlink(), f"{name}: check out with symbolic links switched on"
        assert not link.readlink().is_absolute()


def test_public_names_exist():
    assert all(hasattr(mpic_rag, name) for name in mpic_rag.__all__)
