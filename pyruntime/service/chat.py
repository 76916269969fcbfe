"""From a conversation to the text that the model's own template makes of it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from google.protobuf import json_format

from pyruntime.control_tokens import MarkedText
from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.validate import check_length, optional, show, text_bytes
from pyruntime.v1 import generate_pb2

RESERVED_TEMPLATE_NAMES = frozenset(
    "tokenizer conversation messages chat_template tools documents tokenize padding truncation max_length"
    " return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs continue_final_message"
    " add_generation_prompt processor_kwargs sanitize_control_tokens".split()
)
OWN_FIELDS = ("role", "content")


def chat_bytes(chat: generate_pb2.Chat) -> int:
    """Bytes of everything that a template may write out."""
    said = sum(text_bytes(m.role) + text_bytes(m.content) + text_bytes(m.fields_json) for m in chat.messages)
    return said + sum(map(text_bytes, chat.tools_json)) + chat.template_arguments.ByteSize()


def render_chat(
    model: ServedModel, chat: generate_pb2.Chat, field: str, max_bytes: int, max_entries: int
) -> MarkedText:
    """The conversation through the model's own template; ``field`` names it in errors.

    At most ``max_entries`` messages, and tools, of ``max_bytes`` in all. ``InvalidField`` for what the proto's comments
    do not allow; ``CapabilityMissing`` where there is no template, or one that knows no tools.
    """
    _check_sizes(chat, field, max_bytes, max_entries)
    options = _template_arguments(chat, field)
    messages = [_message(message, f"{field}.messages[{place}]") for place, message in enumerate(chat.messages)]
    tools = [_json_object(text, f"{field}.tools_json[{place}]") for place, text in enumerate(chat.tools_json)]
    if tools:
        options["tools"] = tools
    if chat.continue_final_message:
        _check_continued(chat, field)
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        options["add_generation_prompt"] = optional(chat, "add_generation_prompt", True)
    if chat.allow_control_tokens:
        return MarkedText(model.tokenizer.render_chat(messages, **options))
    return model.tokenizer.render_data(messages, **options)


def _check_sizes(chat: generate_pb2.Chat, field: str, max_bytes: int, max_entries: int) -> None:
    if not chat.messages:
        raise InvalidField(f"{field}.messages", "is empty; allowed: at least one message")
    check_length(f"{field}.messages", len(chat.messages), max_entries)
    check_length(f"{field}.tools_json", len(chat.tools_json), max_entries)
    check_length(field, chat_bytes(chat), max_bytes, "bytes")


def _check_continued(chat: generate_pb2.Chat, field: str) -> None:
    if optional(chat, "add_generation_prompt", False):
        problem = "is true beside continue_final_message; allowed: false or unset"
        raise InvalidField(f"{field}.add_generation_prompt", problem)
    if not chat.messages[-1].content.strip():
        problem = "is blank: there is nothing to continue; unset continue_final_message"
        raise InvalidField(f"{field}.messages[{len(chat.messages) - 1}].content", problem)


def _template_arguments(chat: generate_pb2.Chat, field: str) -> dict[str, Any]:
    path = f"{field}.template_arguments"
    try:
        arguments: dict[str, Any] = _whole(json_format.MessageToDict(chat.template_arguments))
    except ValueError as error:  # a number that is not finite
        raise InvalidField(path, f"{error}; allowed: what JSON can say") from error
    for name in arguments:
        if name in RESERVED_TEMPLATE_NAMES or not re.fullmatch(r"[A-Za-z]\w{0,63}", name):
            raise InvalidField(path, f"{show(name)} cannot be set; allowed: names that the renderer leaves free")
    return arguments


def _whole(value: Any) -> Any:
    """Numbers without a fraction as integers, since a Struct knows none and a template would write 3.0."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _message(message: generate_pb2.Chat.Message, path: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidField(f"{path}.role", "is empty; allowed: a role that the model's chat template knows")
    own = {"role": message.role, "content": message.content}
    further = _json_object(message.fields_json, f"{path}.fields_json") if message.fields_json else {}
    for name in OWN_FIELDS:
        if name in further:
            raise InvalidField(f"{path}.fields_json", f"holds {name!r}; allowed: any keys but role and content")
    return own | further


def _json_object(text: str, path: str) -> dict[str, Any]:
    """``text`` parsed, its keys in their order. Anything but an object of proper JSON is an ``InvalidField``."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no half of a surrogate pair, no 1e999
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {show(str(error))}"
        raise InvalidField(path, f"{problem}; allowed: a JSON object, as text") from error
    if not isinstance(value, dict):
        raise InvalidField(path, f"is a JSON {type(value).__name__}; allowed: a JSON object, as text")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
