"""From request texts to checked token ids, on a few worker threads so that long texts never hold the event loop up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf import json_format

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.validate import check_text, check_token_ids, optional, show
from pyruntime.v1 import common_pb2, generate_pb2

T = TypeVar("T")

# Below this many bytes tokenising takes less time than handing the work to a thread.
INLINE_BYTES = 1024
RESERVED_TEMPLATE_NAMES = frozenset(
    "tokenizer conversation messages chat_template tools documents tokenize padding truncation max_length"
    " return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs continue_final_message"
    " add_generation_prompt processor_kwargs".split()
)


class TextWorkers:
    """Threads that tokenise. The tokenizers' own code releases the interpreter lock while it works."""

    def __init__(self, num_threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def run(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` on a worker; at once when the request has few bytes."""
        if num_bytes <= INLINE_BYTES:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


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


def known_ids(model: ServedModel, ids: list[int], field: str) -> list[int]:
    """What the tokenizer gave, checked: its vocabulary may be larger than the model's."""
    if ids and max(ids) >= model.info.vocab_size:
        piece = model.tokenizer.pieces([max(ids)])[0]
        raise InvalidField(field, f"contains the token {piece!r}, which model {model.info.name!r} does not have")
    return ids


def encode_inputs(
    model: ServedModel,
    inputs: Sequence[common_pb2.Input],
    field: str,
    max_text_bytes: int,
    *,
    special_tokens: bool = True,
    prompt: str = "",
    prompt_field: str = "",
) -> list[list[int] | InvalidField]:
    """Each input's token ids, or what is wrong with it.

    ``prompt`` is put before texts. ``prompt_field`` names the request field that asked for it, if one did: token ids
    cannot be given a prompt, so they are refused then.
    """
    results: list[list[int] | InvalidField] = []
    texts: dict[int, str] = {}
    for index, each in enumerate(inputs):
        path = f"{field}[{index}]"
        try:
            kind = each.WhichOneof("value")
            if kind == "text":
                check_text(f"{path}.text", each.text, max_text_bytes)
                texts[index] = prompt + each.text
                results.append([])
            else:
                results.append(given_ids(model, each, path, prompt_field))
        except InvalidField as error:
            results.append(error)
    encoded = model.tokenizer.encode_batch(list(texts.values()), special_tokens=special_tokens) if texts else []
    for index, ids in zip(texts, encoded, strict=True):
        try:
            results[index] = known_ids(model, ids, f"{field}[{index}].text")
            if not ids:
                raise InvalidField(f"{field}[{index}].text", "has no tokens")
        except InvalidField as error:
            results[index] = error
    return results


def given_ids(model: ServedModel, value: common_pb2.Input, path: str, prompt_field: str = "") -> list[int]:
    """The ids of an input that is not text."""
    if value.WhichOneof("value") is None:
        raise InvalidField(path, "sets neither text nor token_ids")
    if prompt_field:
        raise InvalidField(f"{path}.token_ids", f"cannot be put behind a text: unset {prompt_field} or send text")
    ids = check_token_ids(f"{path}.token_ids.ids", value.token_ids.ids, model.info.vocab_size)
    if not ids:
        raise InvalidField(f"{path}.token_ids", "is empty")
    return ids


def render_chat(model: ServedModel, chat: generate_pb2.Chat, field: str) -> str:
    """The conversation through the model's own template. ``CapabilityMissing`` when it has none."""
    if not chat.messages:
        raise InvalidField(f"{field}.messages", "is empty; allowed: at least one message")
    for place, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidField(f"{field}.messages[{place}].role", "is empty")
    arguments = json_format.MessageToDict(chat.template_arguments)
    for name in arguments:
        if name in RESERVED_TEMPLATE_NAMES or not re.fullmatch(r"[A-Za-z]\w{0,63}", name):
            raise InvalidField(
                f"{field}.template_arguments",
                f"{show(name)} cannot be set; allowed: names that the renderer leaves free",
            )
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    opens = optional(chat, "add_generation_prompt", True)
    return model.tokenizer.render_chat(messages, add_generation_prompt=opens, **arguments)


def encode_prompt(
    model: ServedModel, request: Any, max_text_bytes: int, special_tokens: bool | None = None
) -> list[int]:
    """The token ids of a ``GenerateRequest`` or ``TokenizeRequest``, whichever form they have.

    ``special_tokens`` None: added to text, not to a chat, whose template writes them itself.
    """
    if request.HasField("text"):
        check_text("text", request.text, max_text_bytes, may_be_blank=True)
        ids = model.tokenizer.encode(request.text, special_tokens=special_tokens is not False)
        return known_ids(model, ids, "text")
    size = sum(len(message.content.encode()) for message in request.chat.messages)
    if size > max_text_bytes:
        raise InvalidField("chat.messages", f"have {size} bytes; allowed: at most {max_text_bytes}")
    text = render_chat(model, request.chat, "chat")
    return known_ids(model, model.tokenizer.encode(text, special_tokens=special_tokens is True), "chat")
