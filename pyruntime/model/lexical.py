"""BGE-M3's own two heads beside the dense one: lexical weights and vectors of tokens.

The FlagEmbedding layout: ``sparse_linear.pt`` (weight [1, H], bias [1]) and ``colbert_linear.pt`` (weight [D, H],
bias [D]) lie beside an encoder's files. Lexical weight of a token t: relu(w · h_t + b), the largest of equal ids, the
ids of [CLS], [SEP], padding and unknown left out. Token vectors: W h_t + b for every token after the first, divided
by their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from pyruntime.errors import ModelLoadError
from pyruntime.model.folder_files import check_tensors, load_tensors
from pyruntime.model.sentence_modules import Dense, Projection

SPARSE_FILE, TOKEN_FILE = "sparse_linear.pt", "colbert_linear.pt"


@dataclass(frozen=True, slots=True)
class LexicalHeads:
    """``weight`` float32 [H] and ``bias`` of the lexical head, the ids it leaves out, and the token head, if any."""

    file: Path
    weight: torch.Tensor
    bias: float
    skipped_ids: tuple[int, ...]
    tokens: Projection | None


def read_lexical(folder: Path) -> LexicalHeads | None:
    """The heads of a folder that has them, else None. Raises ``ModelLoadError`` for a damaged or misshapen file."""
    file = folder / SPARSE_FILE
    if not file.is_file():
        return None
    found = load_tensors(file)
    width = _width(found, file)
    weights = check_tensors(found, {"weight": (1, width), "bias": (1,)}, file)
    weight, bias = weights["weight"][0], weights["bias"].item()
    return LexicalHeads(file, weight, bias, _special_ids(folder), _token_head(folder, width))


def _token_head(folder: Path, width: int) -> Projection | None:
    file = folder / TOKEN_FILE
    if not file.is_file():
        return None
    found = load_tensors(file)
    if _width(found, file) != width:
        raise ModelLoadError(f"{file}: takes rows of {_width(found, file)}, but {SPARSE_FILE} takes {width}")
    gives = int(found["weight"].shape[0])
    weights = check_tensors(found, {"weight": (gives, width), "bias": (gives,)}, file)
    return Projection(torch.nn.Sequential(Dense(weights["weight"], weights["bias"])), width, gives, file)


def _width(found: dict[str, torch.Tensor], file: Path) -> int:
    weight = found.get("weight")
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise ModelLoadError(f"{file}: holds no matrix named weight")
    return int(weight.shape[1])


def _special_ids(folder: Path) -> tuple[int, ...]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelLoadError(f"{folder}: tokenizer: {error}") from error
    names = ("cls", "sep", "eos", "pad", "unk")
    ids = {getattr(tokenizer, f"{name}_token_id") for name in names}
    return tuple(sorted(ids - {None}))
