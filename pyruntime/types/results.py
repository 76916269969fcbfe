"""What comes back from the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyruntime.types.enums import FinishReason

if TYPE_CHECKING:
    from pyruntime.errors import PyruntimeError


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds a request waited in the queue and was in the running batch.

    ``prefill_s``: of the latter, those until its first token was drawn; None without one.
    """

    queue_s: float
    compute_s: float
    prefill_s: float | None = None


class PromptLogprobs(NamedTuple):
    """Of each prompt token but the first, given those before it: numpy arrays [tokens - 1, 1 + alternatives].

    ``ids`` int64: the token itself, then the likeliest in its place, most likely first; ``logprobs`` float32, of each.
    """

    ids: Any
    logprobs: Any


class SampledToken(NamedTuple):
    """A drawn token; ``logprob`` and the likeliest ``top`` (id, logprob) of the raw distribution when asked for.

    ``selected``: logprobs of the request's ``logprob_ids``. ``prompt``: with the first token, when asked for.
    ``following``: tokens drawn behind it in the same step, since drafts foresaw all before them; the last is None where
    its logits were not finite.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    selected: tuple[float, ...] = ()
    prompt: PromptLogprobs | None = None
    following: tuple[SampledToken | None, ...] = ()


@dataclass(slots=True)  # not frozen, which takes five times as long to make: there is one for each token
class TokenEvent:
    """One new token of continuation ``index``. The last event of an index carries ``finish``.

    ``token_id`` is None only on a finish without a new token. ``logprob``, ``top``, ``selected`` and ``prompt`` as in
    ``SampledToken``.
    """

    index: int
    token_id: int | None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    timing: StepTiming | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    selected: tuple[float, ...] = ()
    prompt: PromptLogprobs | None = None


class SparseVector(NamedTuple):
    """``ids``: int64 numpy array [n] ascending; ``weights``: float32 numpy array [n], none of them zero."""

    ids: Any
    weights: Any

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays, as numpy's own arrays tell theirs."""
        return int(self.ids.nbytes + self.weights.nbytes)


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """``values`` by kind: float32 numpy [dimensions], ``SparseVector``, or float32 numpy [tokens, dimensions].

    None with ``error``, the error of this input alone.
    """

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
class ClassifyResult:
    """``scores``: float32 numpy [labels], one a row as [rows, labels] for token classifiers and delimited inputs.

    None with ``error``, the error of this input alone.
    """

    scores: Any
    prompt_tokens: int
    cached_tokens: int = 0
    error: PyruntimeError | None = None
