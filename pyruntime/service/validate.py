"""Range checks of request fields. Each failure is an ``InvalidField`` with field path, value and what is allowed."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Collection
from typing import Any

from google.protobuf.message import Message

from pyruntime.errors import InvalidField, ResponseTooLarge
from pyruntime.registry import GenerationDefaults
from pyruntime.types import SAMPLING_RANGES, SamplingParams
from pyruntime.v1 import generate_pb2

# Makes a message into bytes.
Pack = Callable[[Any], bytes]

MAX_CONTINUATIONS = 128
MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
MAX_CHOICES = 1024
MAX_REQUEST_ID_BYTES = 256
MAX_TOP_LOGPROBS = 20
MAX_SELECTED_LOGPROBS = 64
MAX_CHUNK_TOKENS = 1024
# Beyond these a logit leaves what a float32 holds. Any draw is decided long before.
LEAST_REPETITION_PENALTY = 1e-30
MOST_BIAS = 3.4e38


def show(text: str) -> str:
    """A client's text for an error message: quoted and short."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def check_range(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """``low <= value <= high``, or ``low < value`` with ``open_low``. NaN is out of every range."""
    if not (low <= value <= high) or (open_low and value == low):
        opening = f"above {low:g}, at most" if open_low else f"{low:g} to"
        raise InvalidField(field, f"{value:g} is out of range; allowed: {opening} {high:g}")


def check_count(field: str, value: int, low: int, high: int) -> None:
    """``low <= value <= high`` for integers, shown exactly."""
    if not low <= value <= high:
        raise InvalidField(field, f"{value} is out of range; allowed: {low} to {high}")


@functools.cache
def _numbers(kind: Any) -> frozenset[int]:
    return frozenset(kind.values())


def check_enum(field: str, value: int, kind: Any) -> None:
    """The number is one of the enum's; proto3 lets any number through."""
    if value not in _numbers(kind):
        raise InvalidField(field, f"{value} is not a {kind.DESCRIPTOR.name}; allowed: {', '.join(kind.keys())}")


def check_request_id(value: str) -> None:
    size = len(value.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidField("request_id", f"has {size} bytes; allowed: at most {MAX_REQUEST_ID_BYTES}")


def check_length(field: str, count: int, most: int, unit: str = "entries") -> None:
    """A list, by its length alone, before anything looks at its entries."""
    if count > most:
        raise InvalidField(field, f"has {count} {unit}; allowed: at most {most}")


def check_token_ids(field: str, ids: Collection[int], vocab_size: int, most: int) -> list[int]:
    """The ids as a list: not more than ``most``, each inside the vocabulary."""
    check_length(field, len(ids), most)
    checked = list(ids)
    if checked and max(checked) >= vocab_size:
        place = next(place for place, token_id in enumerate(checked) if token_id >= vocab_size)
        problem = f"{checked[place]} is outside the vocabulary; allowed: 0 to {vocab_size - 1}"
        raise InvalidField(f"{field}[{place}]", problem)
    return checked


def text_bytes(text: str) -> int:
    """Bytes of the text as UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def check_text(field: str, text: str, max_bytes: int, *, may_be_blank: bool = False) -> None:
    """Not longer than the server takes, and not blank."""
    check_length(field, text_bytes(text), max_bytes, "bytes")
    if not may_be_blank and (not text or text.isspace()):
        found = "is empty" if not text else "is blank: white space alone"
        raise InvalidField(field, f"{found}; allowed: 1 to {max_bytes} bytes, some of them no white space")


def optional(message: Any, name: str, default: Any = None) -> Any:
    """The field's value when the client set it, else ``default``."""
    return getattr(message, name) if message.HasField(name) else default


def read_sampling(
    request: generate_pb2.GenerateRequest, defaults: GenerationDefaults, vocab_size: int
) -> SamplingParams:
    """What the client set, else the model's own, else temperature 1, no filter, no penalty. An unset seed is drawn."""
    sampling = request.sampling
    _check_sampling(sampling, vocab_size)

    def choose(name: str, fallback: float) -> Any:
        own = getattr(defaults, name)
        return optional(sampling, name, fallback if own is None else own)

    return SamplingParams(
        temperature=choose("temperature", 1.0),
        top_k=max(0, choose("top_k", 0)),
        top_p=choose("top_p", 1.0),
        min_p=choose("min_p", 0.0),
        seed=optional(sampling, "seed", secrets.randbits(63)),
        repetition_penalty=max(choose("repetition_penalty", 1.0), LEAST_REPETITION_PENALTY),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sorted((token_id, min(bias, MOST_BIAS)) for token_id, bias in sampling.logit_bias.items())),
        logprobs=min(request.logprobs.top, vocab_size) if request.logprobs.enabled else None,
        logprob_ids=tuple(
            check_token_ids("logprobs.token_ids", request.logprobs.token_ids, vocab_size, MAX_SELECTED_LOGPROBS)
        ),
    )


def _check_sampling(sampling: generate_pb2.Sampling, vocab_size: int) -> None:
    for name, (low, high, open_low) in SAMPLING_RANGES.items():
        if sampling.HasField(name):
            check_range(f"sampling.{name}", getattr(sampling, name), low, high, open_low=open_low)
    if sampling.top_k < -1:
        raise InvalidField("sampling.top_k", f"{sampling.top_k} is out of range; allowed: -1 or more, -1 and 0 are off")
    check_length("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASED_TOKENS)
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= vocab_size:
            problem = f"the key is outside the vocabulary; allowed: 0 to {vocab_size - 1}"
            raise InvalidField(f"sampling.logit_bias[{token_id}]", problem)
        if not math.isfinite(bias):
            raise InvalidField(f"sampling.logit_bias[{token_id}]", f"{bias} is not allowed; allowed: finite numbers")


def check_generate(request: generate_pb2.GenerateRequest) -> None:
    """The fields that need no model: n, request id, stop strings, constraint, log-probabilities."""
    check_request_id(request.request_id)
    check_count("n", optional(request, "n", 1), 1, MAX_CONTINUATIONS)
    _check_logprobs(request.logprobs)
    check_count("chunk_tokens", optional(request, "chunk_tokens", 1), 1, MAX_CHUNK_TOKENS)
    check_length("stop.strings", len(request.stop.strings), MAX_STOP_STRINGS)
    for place, text in enumerate(request.stop.strings):
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            problem = f"has {len(text.encode())} bytes; allowed: 1 to {MAX_STOP_BYTES}"
            raise InvalidField(f"stop.strings[{place}]", problem)
    if request.HasField("constraint"):
        _check_constraint(request.constraint)


def _check_logprobs(options: generate_pb2.LogprobOptions) -> None:
    check_count("logprobs.top", options.top, 0, MAX_TOP_LOGPROBS)
    check_length("logprobs.token_ids", len(options.token_ids), MAX_SELECTED_LOGPROBS)
    if options.enabled:
        return
    if options.top:
        raise InvalidField("logprobs.top", f"{options.top} is of no use; allowed: 0 unless `enabled` is true")
    if options.prompt:
        raise InvalidField("logprobs.prompt", "is of no use; allowed: false unless `enabled` is true")
    if options.token_ids:
        raise InvalidField("logprobs.token_ids", "are of no use; allowed: none unless `enabled` is true")


def _check_constraint(constraint: generate_pb2.Constraint) -> None:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidField("constraint", "names no kind; allowed: json_schema, regex, grammar or choice")
    if kind == "choice":
        if not constraint.choice.options:
            raise InvalidField("constraint.choice.options", "is empty; allowed: at least one text")
        check_length("constraint.choice.options", len(constraint.choice.options), MAX_CHOICES)
        for place, option in enumerate(constraint.choice.options):
            if not option:
                raise InvalidField(f"constraint.choice.options[{place}]", "is empty; allowed: texts that are not")
    elif not getattr(constraint, kind):
        raise InvalidField(f"constraint.{kind}", "is empty; allowed: 1 byte or more")


def packer(serialize: Pack, most: int) -> Pack:
    """``serialize`` that raises ``ResponseTooLarge`` above ``most`` bytes; grpc would log a traceback for them."""

    def pack(message: Any) -> bytes:
        raw = serialize(message)
        _check_size(len(raw), most)
        return raw

    return pack


def check_message_size(message: Message, most: int) -> None:
    """``ResponseTooLarge`` when the message has more than ``most`` bytes. Makes all of them to tell."""
    _check_size(message.ByteSize(), most)


def _check_size(size: int, most: int) -> None:
    if size > most:
        limit = f"this server's messages have at most {most} (max_message_bytes)"
        raise ResponseTooLarge(f"the response has {size} bytes; {limit}")
