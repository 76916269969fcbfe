"""What the commands read from and write to a terminal or a pipe."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pyruntime.client.bulk import batches
from pyruntime.client.connection import Token
from pyruntime.client.errors import ApiError
from pyruntime.client.ranking import Classes
from pyruntime.types import SparseVector

T = TypeVar("T")

# Inputs in one request: small enough for progress to be seen, large enough to fill the server's batches.
CHUNK = 64
# Below this many inputs a progress bar only flickers.
PROGRESS_FROM = 2 * CHUNK


class Texts:
    """The arguments, or the lines of standard input, which are read as they are asked for.

    count   how many; None where that shows only at the end, as with a pipe
    """

    def __init__(self, given: list[str], what: str) -> None:
        self._given = given
        self._what = what
        self._reads = not given or given == ["-"]
        self.count = _count_ahead() if self._reads else len(given)

    def __iter__(self) -> Iterator[str]:
        if not self._reads:
            yield from self._given
            return
        is_empty = True
        for line in _lines(self._what):
            is_empty = False
            yield line
        if is_empty:
            raise _nothing(self._what)


def texts(given: list[str], what: str) -> Texts:
    return Texts(given, what)


def whole_text(given: list[str], what: str) -> str:
    """The arguments as one text, or all of standard input."""
    if given and given != ["-"]:
        return " ".join(given)
    stdin = _stdin(what)
    content = _decoded(stdin.read(), "") if stdin is not None else ""
    if not content.strip():
        raise _nothing(what)
    return content.rstrip("\n")


def _lines(what: str) -> Iterator[str]:
    """The lines that are not blank, a text each. ValueError for one that is not UTF-8."""
    for number, raw in enumerate(_stdin(what) or (), 1):
        line = _decoded(raw, f" in line {number}").rstrip("\r\n")
        if line.strip():
            yield line


def _count_ahead() -> int | None:
    """Of a file: read through once without keeping it, which finds bytes that are not UTF-8 before anything is sent."""
    if sys.stdin is None or not sys.stdin.buffer.seekable() or sys.stdin.isatty():
        return None
    start = sys.stdin.buffer.tell()
    count = sum(1 for _ in _lines(""))
    sys.stdin.buffer.seek(start)
    return count


def _stdin(what: str) -> Any:
    """As bytes, since Python would read them by the locale, and in some of them let anything pass."""
    if sys.stdin is None:  # closed before Python began
        return None
    if sys.stdin.isatty():
        print(f"reading {what} from standard input; end with Ctrl-D", file=sys.stderr)
    return sys.stdin.buffer


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8: {error.reason} at byte {error.start}{where}") from None


def _nothing(what: str) -> ValueError:
    return ValueError(f"no {what} was given, neither as an argument nor on standard input")


def chunks(texts: Texts, unit: str, size: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """The texts a request at a time, each with its first one's place; many with a progress bar on standard error."""
    start = 0
    with _bar(texts.count, unit) as bar:
        for chunk in batches(texts, size or CHUNK):
            yield start, chunk
            start += len(chunk)
            bar.update(len(chunk))


def progress(results: Iterable[T], count: int | None, unit: str) -> Iterator[T]:
    """The results as they come; many with a progress bar on standard error."""
    with _bar(count, unit) as bar:
        for result in results:
            yield result
            bar.update()


def _bar(count: int | None, unit: str) -> Any:
    """Of a number that is not known: where somebody watches, and once it has taken a moment."""
    from tqdm import tqdm

    if count is None:
        return tqdm(unit=f" {unit}", disable=None, delay=1.0, file=sys.stderr)
    return tqdm(total=count, unit=f" {unit}", disable=count < PROGRESS_FROM, file=sys.stderr)


def token_of(path: str | None) -> Token | None:
    """The one in the file, read again for each call, since long work outlives a token; else that of the environment."""
    if path is None:
        return os.environ.get("PYRUNTIME_TOKEN") or None

    def read() -> str:
        token = Path(path).read_text(encoding="ascii", errors="replace").strip()
        if len(token.split()) != 1:
            raise ValueError(f"{path} holds more than a token" if token else f"{path} is empty")
        return token

    read()
    return read


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
    error.renumber(lambda _: index)
    if options.json:
        print(json.dumps({"index": index, "error": {"code": error.code, "message": error.message}}, ensure_ascii=False))
    else:
        print(f"pyruntime: {unit} {index}: {error}", file=sys.stderr)
    return 1


def print_error(error: ApiError, target: str) -> None:
    print(f"pyruntime: {error}", file=sys.stderr)
    # The message says the same of a single one.
    for violation in error.violations if len(error.violations) > 1 else ():
        print(f"  {violation.field}: {violation.description}", file=sys.stderr)
    if error.retry_after_s is not None:
        print(f"  retry in {error.retry_after_s:g} s", file=sys.stderr)
    if error.code == "UNAUTHENTICATED":
        print("  give a token with --token-file or PYRUNTIME_TOKEN", file=sys.stderr)
    if error.code == "UNIMPLEMENTED" and not error.reason:
        print(f"  what answers at {target} is no pyruntime server, or another version of it", file=sys.stderr)
    if error.code == "UNAVAILABLE" and not error.reason:
        print(f"  nothing could be reached at {target}: is the server up, and is --target right?", file=sys.stderr)
        print("  A server with a certificate needs --tls or --ca, one without it neither.", file=sys.stderr)
    if error.code == "DEADLINE_EXCEEDED":
        print("  a longer --timeout gives it more time", file=sys.stderr)
    if error.code in ("INTERNAL", "UNKNOWN"):
        print(f"  in the server's log: request {error.request_id}", file=sys.stderr)


def print_wait(error: ApiError, wait_s: float) -> None:
    """Not for the short waits at the beginning."""
    if wait_s >= 1:
        print(f"pyruntime: {error}; trying again in {wait_s:.1f} s", file=sys.stderr)


def shown_classes(classes: Classes) -> tuple[dict[str, Any], str]:
    """An input's classes as JSON's fields and as a line."""
    if isinstance(classes, dict):
        return {"scores": classes}, "  ".join(f"{label} {score:.6f}" for label, score in classes.items())
    records = [{"token_id": each.token_id, "piece": each.piece, "scores": each.scores} for each in classes]
    best = [(each.piece, *next(iter(each.scores.items()))) for each in classes]
    return {"tokens": records}, "  ".join(f"{piece}/{label} {score:.3f}" for piece, label, score in best)
