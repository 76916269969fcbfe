"""GGUF files as ordinary Hugging Face folders.

transformers can read a GGUF file but takes most of a minute for 270 million weights, because it
dequantises in Python, and it will not save what it read. So a file is converted once into a bfloat16
safetensors folder in the user's cache, and served from there like any other model.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from pyruntime.errors import ModelLoadError
from pyruntime.model.cache import Progress, prepare_once

#: Part of every cache key: raise it when the same file would convert to something else.
CONVERTER_VERSION = 1
_MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` is an existing file that begins as GGUF files do, whatever it is called."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def ensure_converted(path: str | Path, progress: Progress) -> Path:
    """The Hugging Face folder of a GGUF file, converted on first use (about 50 s for 270M weights).

    Raises ``ModelLoadError`` when the file is not GGUF or transformers cannot read its architecture.
    """
    path = Path(path).expanduser()
    if not is_gguf(path):
        raise ModelLoadError(f"{path} is not a GGUF file")
    key = conversion_key(file_sha256(path))
    return prepare_once(key, lambda folder: convert_gguf(path, folder, progress), progress)


def conversion_key(sha256: str) -> str:
    """The cache key of the conversion of a GGUF file with this digest."""
    return f"gguf-{sha256[:32]}-v{CONVERTER_VERSION}"


def file_sha256(path: Path) -> str:
    """Digest of the whole file: quantised siblings share their first megabytes, so no sample would do."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(gguf: Path, out: Path, progress: Progress) -> None:
    """Write ``gguf`` into the folder ``out`` as bfloat16 safetensors with config and tokenizer.

    Raises ``ModelLoadError`` naming the file when transformers cannot read it.
    """
    started = time.monotonic()

    def step(number: int, what: str) -> None:
        progress(f"converting {gguf.name}, once: step {number} of 3, {what} ({time.monotonic() - started:.0f} s)")

    try:
        step(1, "reading the tokenizer")
        _convert_tokenizer(gguf, out)
        step(2, "dequantising the weights")
        model = _plain_model(gguf)
    except (ImportError, KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{gguf} cannot be converted: {error}") from error
    step(3, "writing bfloat16 safetensors")
    model.save_pretrained(out)
    facts = {"source": gguf.name, "converter_version": CONVERTER_VERSION}
    (out / "conversion.json").write_text(json.dumps(facts, indent=1) + "\n")
    progress(f"converted {gguf.name} in {time.monotonic() - started:.0f} s")


def _convert_tokenizer(gguf: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _plain_model(gguf: Path) -> Any:
    """The file's weights in a model that transformers agrees to save."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    # Releases that can compute on packed blocks would leave them packed where their kernels are installed.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    config = read.config
    # The mark of a quantised source is what makes save_pretrained refuse; the weights no longer are.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    return plain
