"""What the commands read from and write to a terminal or a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from pyruntime.client.errors import ApiError
from pyruntime.client.ranking import Classes
from pyruntime.types import SparseVector

T = TypeVar("T")

# Inputs in one request: small enough for progress to be seen, large enough to fill the server's batches.
CHUNK = 64
# Below this many inputs a progress bar only flickers.
PROGRESS_FROM = 2 * CHUNK


def texts(given: list[str], what: str, *, whole: bool = False) -> list[str]:
    """The arguments, or standard input: its lines, or with ``whole`` all of it as one text."""
    if given and given != ["-"]:
        return [" ".join(given)] if whole else given
    content = _standard_input(what)
    found = [content.rstrip("\n")] if whole else content.splitlines()
    found = [text for text in found if text.strip()]
    if not found:
        raise ValueError(f"no {what} was given, neither as an argument nor on standard input")
    return found


def _standard_input(what: str) -> str:
    """All of it. As bytes, since Python would read them by the locale, and in some of them let anything pass."""
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        print(f"reading {what} from standard input; end with Ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8: {error.reason} at byte {error.start}") from None


def chunks(texts: list[T], unit: str) -> Iterator[tuple[int, list[T]]]:
    """The texts a request at a time, each with its first one's place; many with a progress bar on standard error."""
    from tqdm import tqdm

    with tqdm(total=len(texts), unit=f" {unit}", disable=len(texts) < PROGRESS_FROM, file=sys.stderr) as bar:
        for start in range(0, len(texts), CHUNK):
            chunk = texts[start : start + CHUNK]
            yield start, chunk
            bar.update(len(chunk))


def progress(results: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """The results as they come; many with a progress bar on standard error."""
    from tqdm import tqdm

    return iter(tqdm(results, total=total, unit=f" {unit}", disable=total < PROGRESS_FROM, file=sys.stderr))


def shown_embedding(value: np.ndarray | SparseVector) -> tuple[dict[str, Any], str]:
    """An embedding as a JSON record and as a line; vectors of tokens stand behind one another, split by semicolons."""
    if isinstance(value, SparseVector):
        ids, weights = value.ids.tolist(), numbers(value.weights)
        pairs = " ".join(f"{token_id}:{weight:g}" for token_id, weight in zip(ids, weights, strict=True))
        return {"token_ids": ids, "weights": weights}, pairs
    if value.ndim == 1:
        vector = numbers(value)
        return {"embedding": vector}, " ".join(f"{number:g}" for number in vector)
    vectors = [numbers(row) for row in value]
    return {"embeddings": vectors}, "; ".join(" ".join(f"{number:g}" for number in row) for row in vectors)


def numbers(vector: np.ndarray) -> list[float]:
    """The shortest digits of each float32."""
    return [float(str(number)) for number in vector]


def emit(options: argparse.Namespace, record: dict[str, Any], line: str) -> None:
    print(json.dumps(record, ensure_ascii=False) if options.json else line)


def emit_error(options: argparse.Namespace, index: int, unit: str, error: ApiError) -> int:
    """An input's error in its result's place; on standard error unless the output is JSON. Counts as one."""
    if options.json:
        print(json.dumps({"index": index, "error": {"code": error.code, "message": error.message}}, ensure_ascii=False))
    else:
        print(f"pyruntime: {unit} {index}: {error}", file=sys.stderr)
    return 1


def print_error(error: ApiError) -> None:
    print(f"pyruntime: {error}", file=sys.stderr)
    # The message says the same of a single one.
    for violation in error.violations if len(error.violations) > 1 else ():
        print(f"  {violation.field}: {violation.description}", file=sys.stderr)
    if error.retry_after_s is not None:
        print(f"  retry in {error.retry_after_s:g} s", file=sys.stderr)


def shown_classes(classes: Classes) -> tuple[dict[str, Any], str]:
    """An input's classes as JSON's fields and as a line."""
    if isinstance(classes, dict):
        return {"scores": classes}, "  ".join(f"{label} {score:.6f}" for label, score in classes.items())
    records = [{"token_id": each.token_id, "piece": each.piece, "scores": each.scores} for each in classes]
    best = [(each.piece, *next(iter(each.scores.items()))) for each in classes]
    return {"tokens": records}, "  ".join(f"{piece}/{label} {score:.3f}" for piece, label, score in best)
