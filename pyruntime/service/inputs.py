"""From request texts to checked token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyruntime.control_tokens import ControlTokens, MarkedText
from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.chat import render_chat
from pyruntime.service.validate import check_text, check_token_ids, text_bytes
from pyruntime.service.workers import TextWorkers, slices
from pyruntime.v1 import common_pb2


@dataclass(frozen=True)
class InputLimits:
    """What the server takes: bytes of one text (and ids of one list), messages of one chat."""

    max_text_bytes: int
    max_messages: int


@dataclass(frozen=True)
class TokenLimit:
    """Most tokens of an input, and what happens to a longer one."""

    max_tokens: int
    truncation: common_pb2.Truncation

    def fit(self, model: ServedModel, ids: list[int], field: str) -> list[int]:
        """``ids``, cut where the client allows it; ``InvalidField`` where not."""
        if len(ids) <= self.max_tokens:
            return ids
        if self.truncation == common_pb2.TRUNCATION_RIGHT:
            return model.tokenizer.truncate(ids, self.max_tokens, "head")
        if self.truncation == common_pb2.TRUNCATION_LEFT:
            return model.tokenizer.truncate(ids, self.max_tokens, "tail")
        problem = f"has {len(ids)} tokens; allowed: at most {self.max_tokens} unless truncation is set"
        raise InvalidField(field, problem)


@dataclass(frozen=True)
class Reading:
    """How the inputs of one request are read.

    ``prompt`` is put before texts. ``prompt_field`` names the request field that asked for it, if one did: token ids
    cannot be given a prompt, so they are refused then. With ``control``, the names of its tokens in texts are text, in
    the prompt tokens, and no special tokens are added. An error names the input as FIELD[PLACE] with ``suffix``, its
    text with ``text_suffix`` behind.
    """

    field: str
    limits: InputLimits
    suffix: str = ""
    text_suffix: str = ".text"
    special_tokens: bool = True
    prompt: str = ""
    prompt_field: str = ""
    control: ControlTokens | None = None
    token_limit: TokenLimit | None = None

    def path(self, place: int) -> str:
        return f"{self.field}[{place}]{self.suffix}"

    def text_path(self, place: int) -> str:
        return self.path(place) + self.text_suffix


def size_of(value: common_pb2.Input, prompt_bytes: int = 0) -> int:
    """What an input counts for: the bytes of its text and of the prompt before it, or one for each token id."""
    if value.WhichOneof("value") == "text":
        return prompt_bytes + text_bytes(value.text)
    return len(value.token_ids.ids)


async def read_inputs(
    workers: TextWorkers, model: ServedModel, inputs: Sequence[common_pb2.Input], reading: Reading
) -> list[list[int] | InvalidField]:
    """Each input's token ids, or what is wrong with it; a slice at a time, so that other requests get their turn."""
    prompt_bytes = text_bytes(reading.prompt)
    sizes = [size_of(each, prompt_bytes) for each in inputs]
    results: list[list[int] | InvalidField] = []
    for places in slices(sizes):
        num_bytes = sum(sizes[place] for place in places)
        results += await workers.run(num_bytes, _read_some, model, inputs, places, reading)
    return results


def _read_some(
    model: ServedModel, inputs: Sequence[common_pb2.Input], places: range, reading: Reading
) -> list[list[int] | InvalidField]:
    results: dict[int, list[int] | InvalidField] = {}
    texts: dict[int, str] = {}
    for place in places:
        each, path = inputs[place], reading.path(place)
        try:
            if each.WhichOneof("value") == "text":
                check_text(reading.text_path(place), each.text, reading.limits.max_text_bytes)
                texts[place] = each.text
            else:
                results[place] = given_ids(model, each, path, reading.limits, reading.prompt_field)
        except InvalidField as error:
            results[place] = error
    results |= _encode_texts(model, texts, reading)
    return [_fit(model, results[place], place, reading) for place in places]


def _encode_texts(model: ServedModel, texts: dict[int, str], reading: Reading) -> dict[int, list[int] | InvalidField]:
    if not texts:
        return {}
    results: dict[int, list[int] | InvalidField] = {}
    for place, ids in zip(texts, _encoded(model, list(texts.values()), reading), strict=True):
        path = reading.text_path(place)
        try:
            results[place] = known_ids(model, told(ids, path), path) or InvalidField(path, "has no tokens")
        except InvalidField as error:
            results[place] = error
    return results


def _encoded(model: ServedModel, texts: list[str], reading: Reading) -> Sequence[list[int] | InvalidField]:
    if reading.control is not None:
        return reading.control.encode_behind(reading.prompt, texts)
    whole = [reading.prompt + text for text in texts]
    return model.tokenizer.encode_batch(whole, special_tokens=reading.special_tokens)


def told(ids: list[int] | InvalidField, field: str) -> list[int]:
    """``ids``; raises the error that they are as one of ``field``."""
    if isinstance(ids, InvalidField):
        raise InvalidField(field, ids.problem)
    return ids


def _fit(model: ServedModel, ids: list[int] | InvalidField, place: int, reading: Reading) -> list[int] | InvalidField:
    if isinstance(ids, InvalidField) or reading.token_limit is None:
        return ids
    try:
        return reading.token_limit.fit(model, ids, reading.path(place))
    except InvalidField as error:
        return error


def known_ids(model: ServedModel, ids: list[int], field: str) -> list[int]:
    """What the tokenizer gave, checked: its vocabulary may be larger than the model's."""
    if ids and max(ids) >= model.info.vocab_size:
        piece = model.tokenizer.pieces([max(ids)])[0]
        raise InvalidField(field, f"contains the token {piece!r}, which model {model.info.name!r} does not have")
    return ids


def given_ids(
    model: ServedModel, value: common_pb2.Input, path: str, limits: InputLimits, prompt_field: str = ""
) -> list[int]:
    """The ids of an input that is not text."""
    if value.WhichOneof("value") is None:
        raise InvalidField(path, "sets neither text nor token_ids")
    if prompt_field:
        raise InvalidField(f"{path}.token_ids", f"cannot be put behind a text: unset {prompt_field} or send text")
    given = value.token_ids.ids
    ids = check_token_ids(f"{path}.token_ids.ids", given, model.info.vocab_size, limits.max_text_bytes)
    if not ids:
        raise InvalidField(f"{path}.token_ids", "is empty")
    return ids


async def read_prompt(
    workers: TextWorkers,
    model: ServedModel,
    request: Any,
    limits: InputLimits,
    *,
    special_tokens: bool | None = None,
    may_be_blank: bool = False,
) -> list[int]:
    """The token ids of a ``GenerateRequest`` or ``TokenizeRequest`` that holds text or a chat.

    ``special_tokens`` None: added to text, not to a chat, whose template writes them itself.
    """
    if request.HasField("text"):
        check_text("text", request.text, limits.max_text_bytes, may_be_blank=may_be_blank)
        adds_special = special_tokens is not False
        return await workers.run(text_bytes(request.text), encode_text, model, request.text, "text", adds_special)
    # A template is a program of its own: a chat goes to a worker however short it is.
    bounds = limits.max_text_bytes, limits.max_messages
    chat = await workers.run_aside(render_chat, model, request.chat, "chat", *bounds)
    check_text("chat", chat.plain, limits.max_text_bytes, may_be_blank=may_be_blank)
    return await workers.run(text_bytes(chat.text), _encode_chat, model, chat, special_tokens is True)


def _encode_chat(model: ServedModel, chat: MarkedText, special_tokens: bool) -> list[int]:
    return known_ids(model, model.tokenizer.encode_chat(chat, special_tokens=special_tokens), "chat")


def encode_text(model: ServedModel, text: str, field: str, special_tokens: bool) -> list[int]:
    """The ids of one text, none for some texts; ``InvalidField`` where the model lacks one of them."""
    return known_ids(model, model.tokenizer.encode(text, special_tokens=special_tokens), field)
