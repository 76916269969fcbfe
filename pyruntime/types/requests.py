"""What goes down to the engine: token ids and checked parameters, one type a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyruntime.types.enums import EmbeddingKind, PoolingType

#: Of a request's and of a model's own values: (lowest, highest, whether the lowest itself is out).
SAMPLING_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, 2, True),
    "frequency_penalty": (-2, 2, False),
    "presence_penalty": (-2, 2, False),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's draw. temperature 0 is argmax; top_k <= 0 is off; ranges are checked in service/.

    Penalties: frequency and presence of generated tokens, repetition of those and of the prompt's.
    ``logit_bias``: (token id, what is added to its logit). ``logprobs``: how many of the likeliest tokens
    to report beside the drawn one's log-probability; None reports nothing. ``logprob_ids``: tokens whose
    log-probabilities are reported beside it, likely or not; empty without ``logprobs``.
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
    logprob_ids: tuple[int, ...] = ()

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
    """``n`` continuations of one prompt; continuation i draws with n-index i from the same seed.

    ``prompt_logprobs``: how many of the likeliest tokens to report beside the log-probability of each prompt token;
    None reports nothing of the prompt. They come with the first event of continuation 0.
    ``constraint``: what the text must conform to, a ``constraints.matcher.Constraint``; None is anything.
    """

    prompt: list[int]
    sampling: SamplingParams
    stop: StopParams
    n: int = 1
    priority: int = 0
    request_id: str = ""
    prompt_logprobs: int | None = None
    constraint: Any = None


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """One embedding for each input, all of the same kind, pooling, width and normalisation.

    ``kind`` SPARSE reads none of pooling, normalize and dimensions; PER_TOKEN reads the last two.
    ``skip_rows``: how many first rows of each input its pooling leaves out, for models whose prompts are
    read but not pooled; None leaves nothing out. ``as_query``: PER_TOKEN inputs are queries, which keep the tokens
    that a late-interaction model leaves out of documents. ``unattended``: how many last tokens of each input the
    others do not see, for models whose ``QueryExpansion`` is not attended; such models have no cache.
    """

    inputs: list[list[int]]
    pooling: PoolingType
    normalize: bool
    dimensions: int
    token_type_ids: list[list[int]] | None = None
    priority: int = 0
    request_id: str = ""
    kind: EmbeddingKind = EmbeddingKind.DENSE
    skip_rows: list[int] | None = None
    as_query: bool = False
    unattended: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Label scores of the next token after ``prefix + item`` for each item.

    ``apply_softmax``: softmax of the label logits / temperature over the labels alone; otherwise the
    labels' probabilities under the softmax over the whole vocabulary. The prefix is computed once.
    ``raw``: the labels' logits as they are, whatever the other two say.
    """

    prefix: list[int]
    items: list[list[int]]
    label_ids: list[int]
    apply_softmax: bool
    temperature: float = 1.0
    priority: int = 0
    request_id: str = ""
    raw: bool = False


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """The model's own classification head over each input (a text, or a pair already put together).

    ``raw``: logits instead of the model's activation. ``delimiter_token_id``: the head is read at the row before
    each such token after the first of an input, which is packed as q d i1 d ... in d, instead of at its own place.
    ``prefix`` stands before every input and is computed once where the model has a cache.
    """

    inputs: list[list[int]]
    raw: bool = False
    token_type_ids: list[list[int]] | None = None
    delimiter_token_id: int | None = None
    prefix: list[int] = field(default_factory=list)
    priority: int = 0
    request_id: str = ""
