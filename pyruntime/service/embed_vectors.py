"""Embeddings in protobuf's wire format, in the encodings of ``EmbedRequest``.

Whole matrices are written at once, and parsed into the messages that hold them: a copy, not an object a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np

from pyruntime.errors import InvalidField
from pyruntime.types import EmbeddingKind, SparseVector
from pyruntime.v1 import embed_pb2

# Tags of DenseEmbedding's fields, and of TokenEmbeddings.vectors: field number and wire type.
_VALUES, _PACKED, _DIMENSIONS, _SCALE, _VECTORS = b"\x0a", b"\x12", b"\x18", b"\x25", b"\x0a"
# From here on a number rounds to float16's infinity.
_FLOAT16_OVERFLOW = 65520.0


def encode(kind: EmbeddingKind, values: Sequence[Any], encoding: embed_pb2.Encoding) -> list[bytes | InvalidField]:
    """Each of ``EmbedResult.values`` as the bytes of its kind's message, or why float16 cannot hold it."""
    if kind is EmbeddingKind.SPARSE:
        return [_sparse(each).SerializeToString() for each in values]
    if kind is EmbeddingKind.PER_TOKEN:
        return [_tokens(each, encoding) for each in values]
    return _dense(np.array(values), encoding) if values else []  # np.stack takes thrice as long


def _dense(matrix: np.ndarray, encoding: embed_pb2.Encoding) -> list[bytes | InvalidField]:
    """float32 [N, D]: a vector an input."""
    bad = dict(_overflowing(matrix, encoding))
    return [bad.get(place) or row for place, row in enumerate(_rows(_columns(matrix, encoding)))]


def _tokens(matrix: np.ndarray, encoding: embed_pb2.Encoding) -> bytes | InvalidField:
    """float32 [L, D]: a vector a token."""
    for _, error in _overflowing(matrix, encoding):
        return error
    records = _joined(_columns(matrix, encoding))
    return _joined([_entry_head(records.shape[1]), records]).tobytes()


def _sparse(vector: SparseVector) -> embed_pb2.SparseEmbedding:
    return embed_pb2.SparseEmbedding(token_ids=vector.ids.tolist(), weights=vector.weights.tolist())


@lru_cache(maxsize=1024)
def vector_bytes(dimensions: int, encoding: embed_pb2.Encoding) -> int:
    """What one encoded vector adds to a message that holds it, tag and length included."""
    (record,) = _rows(_columns(np.ones((1, dimensions), np.float32), encoding))
    size = len(record)
    return size + len(_entry_head(size))


def quantize_int8(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [N, D] and float32 [N, 1]: number = byte * scale, scale = max |number| / 127. A zero vector has scale 0."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    # Divided by the largest first: a subnormal scale would lose its digits.
    numbers = np.rint(vectors / np.where(largest == 0, np.float32(1), largest) * np.float32(127))
    return numbers.astype(np.int8), largest / np.float32(127)


def _columns(matrix: np.ndarray, encoding: embed_pb2.Encoding) -> list[bytes | np.ndarray]:
    """Side by side, each row of float32 [N, D] as a ``DenseEmbedding``: uint8 [N, ...], or bytes that all rows have."""
    numbers, scales = _encoded(matrix, encoding)
    tag = _VALUES if encoding in (embed_pb2.ENCODING_UNSPECIFIED, embed_pb2.ENCODING_FLOAT) else _PACKED
    parts: list[bytes | np.ndarray] = [tag + _varint(numbers.shape[1]), numbers, _DIMENSIONS + _varint(matrix.shape[1])]
    if scales is not None:
        parts += [_SCALE, _bytes_of(scales.astype("<f4", copy=False))]
    return parts


def _encoded(matrix: np.ndarray, encoding: embed_pb2.Encoding) -> tuple[np.ndarray, np.ndarray | None]:
    """The numbers as uint8 [N, bytes], and their scales where the encoding has them."""
    if encoding == embed_pb2.ENCODING_FLOAT16_LE:
        with np.errstate(over="ignore"):
            return _bytes_of(matrix.astype("<f2")), None
    if encoding == embed_pb2.ENCODING_INT8:
        numbers, scales = quantize_int8(matrix)
        return _bytes_of(numbers), scales
    if encoding == embed_pb2.ENCODING_BINARY:
        return np.packbits(matrix > 0, axis=1), None
    return _bytes_of(matrix.astype("<f4", copy=False)), None


def _bytes_of(matrix: np.ndarray) -> np.ndarray:
    rows, columns = matrix.shape
    return np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, columns * matrix.itemsize)


def _rows(columns: list[bytes | np.ndarray]) -> Iterator[bytes]:
    """Each row by itself: sooner than to join all of them and take them apart again."""
    each = (repeat(column) if isinstance(column, bytes) else map(np.ndarray.tobytes, column) for column in columns)
    return map(b"".join, zip(*each, strict=False))


def _joined(parts: Sequence[bytes | np.ndarray]) -> np.ndarray:
    """uint8 [N, ...]: the parts side by side, those of bytes alike in every row."""
    rows = next(len(part) for part in parts if isinstance(part, np.ndarray))
    columns = [part if isinstance(part, np.ndarray) else np.frombuffer(part, np.uint8) for part in parts]
    joined = np.empty((rows, sum(column.shape[-1] for column in columns)), np.uint8)
    start = 0
    for column in columns:
        joined[:, start : start + column.shape[-1]] = column
        start += column.shape[-1]
    return joined


def _entry_head(size: int) -> bytes:
    return _VECTORS + _varint(size)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _overflowing(matrix: np.ndarray, encoding: embed_pb2.Encoding) -> list[tuple[int, InvalidField]]:
    """The rows that the encoding cannot hold, with what is wrong."""
    if encoding != embed_pb2.ENCODING_FLOAT16_LE:
        return []
    largest = np.abs(matrix).max(axis=1)
    problem = "an embedding holds {:g}, beyond float16's 65504; use another encoding"
    places = np.flatnonzero(largest >= _FLOAT16_OVERFLOW).tolist()
    return [(place, InvalidField("encoding", problem.format(largest[place]))) for place in places]
