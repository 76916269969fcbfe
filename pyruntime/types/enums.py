"""The choices that requests and models make."""

from __future__ import annotations

import enum


class Task(enum.Enum):
    """What reads a sequence's hidden rows after the shared forward."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"

    # Members are equal to themselves alone. Enum's own hash is that of the name, in Python, and the scheduler asks for
    # it tens of times a sequence.
    __hash__ = object.__hash__


# To go through them, which the scheduler does in every step: Enum makes each anew from its name.
TASKS = tuple(Task)


class Capability(enum.Enum):
    """What a served model can do; a request for anything else is ``CapabilityMissing``."""

    GENERATE = "GENERATE"
    EMBED = "EMBED"
    SPARSE_EMBED = "SPARSE_EMBED"
    SCORE = "SCORE"
    RERANK = "RERANK"
    CLASSIFY = "CLASSIFY"


class EmbeddingKind(enum.Enum):
    """One vector of fixed width, weights of vocabulary entries, or one vector a token."""

    DENSE = "dense"
    SPARSE = "sparse"
    PER_TOKEN = "per_token"


class PoolingType(enum.IntEnum):
    """How a sequence's hidden rows become one vector. Values are what the ``pool`` kernel takes."""

    LAST = 0
    CLS = 1
    MEAN = 2


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class ExecutionPath(enum.Enum):
    """How a model's batches run: packed without padding through our attention, or padded through its own."""

    PACKED = "packed"
    PADDED = "padded"
