"""Fields of requests from Python values. What a field cannot hold is an error that names field, value and range."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# What a field takes, by its type.
_MANY = {
    FieldDescriptor.CPPTYPE_INT32: f"whole numbers of {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"whole numbers of {-(2**63)} to {2**63 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"whole numbers of 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"whole numbers of 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "numbers",
    FieldDescriptor.CPPTYPE_DOUBLE: "numbers",
    FieldDescriptor.CPPTYPE_BOOL: "True and False",
    FieldDescriptor.CPPTYPE_STRING: "texts",
}


def shown(value: object) -> str:
    """Type and value, short enough for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def fill(message: Message, given: Mapping[str, Any], option: str = "") -> None:
    """Sets fields of ``message``. None leaves one unset, numpy's scalars are taken as Python's, enums by short names.

    ``option``: how the caller knows the field, where that is not its name.
    TypeError for an unknown name and a value of another type, ValueError for one out of the field's range.
    """
    for name, value in given.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            raise TypeError(f"unknown option {name!r}")
        if value is None:
            continue
        value = value.item() if isinstance(value, np.generic) else value
        if field.enum_type is not None and isinstance(value, str):
            value = _names(field).get(value.lower(), value)
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except UnicodeEncodeError as error:
            raise located(error, option or name) from None
        except (TypeError, ValueError, AttributeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{option or name}: {shown(value)} is not allowed; allowed: {_allowed(field)}") from None


def located(error: UnicodeEncodeError, option: str) -> UnicodeEncodeError:
    """The same, which says in which text the lone surrogate is."""
    return UnicodeEncodeError(error.encoding, error.object, error.start, error.end, f"{error.reason}, in {option}")


def as_json(value: Any, option: str) -> str:
    """JSON text of plain Python values. TypeError or ValueError, which names ``option``, for others."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{option}: {shown(value)} cannot be written as JSON: {error}") from None


def _names(field: Any) -> dict[str, int]:
    """What an enum's values are called without what they all begin with, but for the one that stands for none."""
    names = [value.name for value in field.enum_type.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix).lower(): value.number for value in field.enum_type.values if value.number}


def _allowed(field: Any) -> str:
    if field.enum_type is not None:
        return ", ".join(map(repr, _names(field)))
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return f"a mapping of {_allowed(key)} to {_allowed(value)}"
    if entry is not None:
        return "a mapping of names to what JSON has"
    return f"a list of {_MANY[field.cpp_type]}" if field.is_repeated else _MANY[field.cpp_type]
