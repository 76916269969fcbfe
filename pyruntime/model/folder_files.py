"""Files of a model's folder, read or refused with the file's name: JSON, numbers in it, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from pyruntime.errors import ModelLoadError

T = TypeVar("T")

_FORMS: dict[type, str] = {bool: "true or false", str: "a text", dict: "an object"}


def read_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Exactly the tensors of ``shapes`` from the folder's weight file, in float32; else ``ModelLoadError``."""
    file = next((folder / n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()), None)
    if file is None:
        raise ModelLoadError(f"{folder}: neither model.safetensors nor pytorch_model.bin is there")
    return check_tensors(load_tensors(file), shapes, file)


def load_tensors(file: Path) -> dict[str, Any]:
    """A weight file's entries; a pickle is read as weights alone, never as code."""
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file raises whatever its reader meets first
        raise ModelLoadError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def check_tensors(found: dict[str, Any], shapes: dict[str, tuple[int, ...]], file: Path) -> dict[str, torch.Tensor]:
    """``found`` in float32 where it holds the tensors of ``shapes`` and no others; else ``ModelLoadError``."""
    actual = {key: tuple(getattr(value, "shape", ())) for key, value in found.items()}
    if actual != shapes:
        raise ModelLoadError(f"{file}: holds {_shown(actual)}, but the configuration asks for {_shown(shapes)}")
    weights = {key: value.float().contiguous() for key, value in found.items()}
    for key, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise ModelLoadError(f"{file}: {key} holds values that are not finite")
    return weights


def _shown(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in sorted(shapes.items()))


def positive(config: dict[str, Any], key: str, file: Path) -> int:
    """A configuration's positive number; ``ModelLoadError`` names the file and the key."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{file}: {key} is {value!r}; expected a positive number")
    return value


def typed(config: dict[str, Any], key: str, kind: type[T], file: Path) -> T | None:
    """A configuration's true or false, text or object, None where it has none or null; else ``ModelLoadError``."""
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise ModelLoadError(f"{file}: {key} is {value!r}; expected {_FORMS[kind]}")
    return value


def words(config: dict[str, Any], key: str, file: Path) -> list[str] | None:
    """A configuration's list of texts, or its one text as a list; None where it has none; else ``ModelLoadError``."""
    value = config.get(key)
    found = [value] if isinstance(value, str) else value
    if found is not None and not (isinstance(found, list) and all(isinstance(each, str) for each in found)):
        raise ModelLoadError(f"{file}: {key} is {value!r}; expected a list of texts")
    return found


def read_json(file: Path) -> Any:
    """The file's content; ``ModelLoadError`` names the file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: {error}") from error


def read_object(file: Path) -> dict[str, Any]:
    """The file's object; ``ModelLoadError`` names a file that is not there or holds anything else."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file}: expected a JSON object")
    return found


def optional_json(file: Path) -> dict[str, Any]:
    """As ``read_object``, but an empty one where there is no such file."""
    return read_object(file) if file.is_file() else {}
