"""The nouns that all layers share: requests going down, the batch, results coming up.

Token ids are plain ``int`` lists here; tensors appear only in ``ForwardBatch``, which the batch
builder makes and the model and heads read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from pyruntime.errors import PyruntimeError


class Task(enum.Enum):
    """What reads a sequence's hidden rows after the shared forward."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class Capability(enum.Enum):
    """What a served model can do; a request for anything else is ``CapabilityMissing``."""

    GENERATE = "GENERATE"
    EMBED = "EMBED"
    SCORE = "SCORE"


class PoolingType(enum.IntEnum):
    """How a sequence's hidden rows become one vector. Values are what the ``pool`` kernel takes."""

    LAST = 0
    CLS = 1
    MEAN = 2


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's draw. temperature 0 is argmax; top_k <= 0 is off; ranges are checked in service/.

    Penalties: frequency and presence of generated tokens, repetition of those and of the prompt's.
    ``logit_bias``: (token id, what is added to its logit). ``logprobs``: how many of the likeliest tokens
    to report beside the drawn one's log-probability; None reports nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def penalizes(self) -> bool:
        """Whether tokens seen before change the draw."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends. ``token_ids`` already holds the model's EOS ids unless they are ignored."""

    max_new_tokens: int
    min_new_tokens: int = 0
    token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``n`` continuations of one prompt; continuation i draws with n-index i from the same seed."""

    prompt: list[int]
    sampling: SamplingParams
    stop: StopParams
    n: int = 1
    priority: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """One vector for each input, all with the same pooling, width and normalisation."""

    inputs: list[list[int]]
    pooling: PoolingType
    normalize: bool
    dimensions: int
    token_type_ids: list[list[int]] | None = None
    priority: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Label scores of the next token after ``prefix + item`` for each item.

    ``apply_softmax``: softmax of the label logits / temperature over the labels alone; otherwise the
    labels' probabilities under the softmax over the whole vocabulary. The prefix is computed once.
    """

    prefix: list[int]
    items: list[list[int]]
    label_ids: list[int]
    apply_softmax: bool
    temperature: float = 1.0
    priority: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds a request waited in the queue and was in the running batch."""

    queue_s: float
    compute_s: float


class SampledToken(NamedTuple):
    """A drawn token; ``logprob`` and the likeliest ``top`` (id, logprob) of the raw distribution when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of continuation ``index``. The last event of an index carries ``finish``.

    ``token_id`` is None only on a finish without a new token. ``logprob`` and ``top`` as in ``SampledToken``.
    """

    index: int
    token_id: int | None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    timing: StepTiming | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """``values``: float32 numpy array [dimensions], or the error of this input alone."""

    values: object
    prompt_tokens: int
    cached_tokens: int = 0
    error: PyruntimeError | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """One probability a label, in the request's label order, or the error of this item alone."""

    scores: list[float]
    prompt_tokens: int
    cached_tokens: int = 0
    error: PyruntimeError | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What ``GetModel`` tells and what the service checks requests against."""

    name: str
    architecture: str
    dtype: str
    device: str
    capabilities: frozenset[Capability]
    context_length: int
    vocab_size: int
    embedding_dimensions: int
    default_pooling: PoolingType
    normalize_default: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    kv_cache_tokens: int = 0


@dataclass(slots=True)
class SequenceRows:
    """Where one sequence's rows lie in a ``ForwardBatch`` and what to do with them.

    ``start``/``length``: its rows in the packed batch. ``reads``: True when this step reaches the end
    of what is known of the sequence, so a head reads it; False for a prompt chunk that goes on.
    """

    sequence: Any
    task: Task
    start: int
    length: int
    reads: bool

    @property
    def last(self) -> int:
        """The packed row of its last token, which a sampler or score head reads."""
        return self.start + self.length - 1


@dataclass(slots=True)
class ForwardBatch:
    """One packed forward over sequences of any task. T tokens, S sequences.

    input_ids, positions        int64 [T]
    token_type_ids              int64 [T] or None
    query_starts                int32 [S+1], rows of sequence i are query_starts[i]:query_starts[i+1]
    kv_lengths                  int32 [S], keys that sequence i holds after this step (None: no cache)
    block_tables                int32 [S, most blocks], -1 padded (None: no cache)
    slot_mapping                int64 [T], cache slot (block * block_size + offset) of each new key
    block_copies                int64 [C, 2] (source, target) blocks copied before the forward, or None
    """

    rows: list[SequenceRows]
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    token_type_ids: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    block_copies: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(slots=True)
class GenerationBatchResult:
    """tokens[i] belongs to the i-th reading GENERATE row; None where its logits were not finite."""

    tokens: list[SampledToken | None]


@dataclass(slots=True)
class EmbeddingBatchResult:
    """float32 numpy vectors, one for each reading EMBED row; None where not finite."""

    embeddings: list[object | None]


@dataclass(slots=True)
class ScoringBatchResult:
    """Label probabilities, one list for each reading SCORE row; None where not finite."""

    scores: list[list[float] | None]
