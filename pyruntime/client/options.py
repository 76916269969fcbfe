"""The options of the clients' methods, by name and type. Ranges and defaults: ``docs/api.md``, or the protos.

An option that is left out, or None, takes the model's own default, or else the server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np

Ids: TypeAlias = Sequence[int] | np.ndarray
Truncation: TypeAlias = Literal["none", "right", "left"]
"""Of an input that is too long: refuse it, cut its right end, cut its left end."""
Kind: TypeAlias = Literal["dense", "sparse", "per_token"]


class CommonOptions(TypedDict, total=False):
    """priority: higher ones go first; request_id: the caller's name for the request, at most 256 bytes."""

    priority: int | None
    request_id: str | None


class ChatOptions(TypedDict, total=False):
    """For a prompt of messages alone. tools: dicts or JSON texts; template_arguments: further variables;
    allow_control_tokens: what messages say may become control tokens.
    """

    tools: Sequence[Mapping[str, Any] | str] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None
    template_arguments: Mapping[str, Any] | None
    allow_control_tokens: bool | None


class GenerateOptions(CommonOptions, ChatOptions, total=False):
    """How a prompt is continued.

    logit_bias         {token id: what is added to its logit}
    n                  continuations of the prompt
    stop               a string that ends the text, or several
    logprobs           how many likeliest tokens to list for each, 0 or more
    prompt_logprobs    those of the prompt's tokens too
    logprob_token_ids  tokens whose log-probability each place lists
    chunk_tokens       of streams: tokens in a piece at least
    json_schema        (text or object), regex, grammar or choice: what the text must conform to; one of them
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    n: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Ids | None
    ignore_eos: bool | None
    include_stop_in_text: bool | None
    logprobs: int | None
    prompt_logprobs: bool | None
    logprob_token_ids: Ids | None
    chunk_tokens: int | None
    json_schema: str | Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None


class EmbedOptions(CommonOptions, total=False):
    """How texts become vectors. ``pooling``, ``normalize`` and ``dimensions`` are for dense vectors, the latter two for
    vectors of tokens as well. ``prompt_name``: one of the model's prompts; ``prompt``: another text before each input.
    """

    pooling: Literal["last", "cls", "mean"] | None
    normalize: bool | None
    dimensions: int | None
    truncation: Truncation | None
    max_tokens: int | None
    prompt_name: str | None
    prompt: str | None


class ScoreOptions(CommonOptions, total=False):
    """apply_softmax: normalise over the labels alone, at ``temperature``; item_first: each item before the query."""

    apply_softmax: bool | None
    temperature: float | None
    item_first: bool | None
    truncation: Truncation | None


class RerankOptions(CommonOptions, total=False):
    """instruction: what the query looks for; raw_scores: before the model's activation."""

    instruction: str | None
    return_documents: bool | None
    raw_scores: bool | None
    truncation: Truncation | None
    max_tokens_per_document: int | None


class ClassifyOptions(CommonOptions, total=False):
    """raw_scores: logits instead of the model's activation; top_k: how many labels come back."""

    raw_scores: bool | None
    top_k: int | None
    truncation: Truncation | None
