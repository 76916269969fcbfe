"""The forms that option values come in: sizes with units, shares of memory, ``NAME=PATH`` pairs, addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from pyruntime.types import Task

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
MODELS_FORM = "NAME=PATH pairs, each name once"
BYTES_FORM = "a number of bytes, or one with a unit, as 512MiB or 2GiB"
_MEMORY_RANGE = (2**20, 2**44)
MEMORY_FORM = f"{_MEMORY_RANGE[0]} to {_MEMORY_RANGE[1]} bytes, with or without a unit as in 512MiB, or 1% to 95%"
SHARES_FORM = "TASK=WEIGHT pairs of generate, embed, score and classify, each once, weights 0.01 to 100"
HOST_FORM = "a host or address without a port, or unix:PATH, not empty"
INNER_HOST_FORM = "a host or address without a port, not empty"
FILE_FORM = "a file's path, or empty for none"
ADDRESS_FORM = "HOST:PORT, unix:PATH, or empty for none; ports 0 to 65535"


def _parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    # More digits than any size has would be infinite as a float.
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(BYTES_FORM)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parse_models(value: object) -> object:
    """A mapping as it is; ``NAME=PATH`` strings, in a list or joined by commas, as a mapping."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, list):
        raise ValueError(MODELS_FORM)
    models: dict[str, str] = {}
    for pair in value:
        name, separator, path = str(pair).partition("=")
        name, path = name.strip(), path.strip()
        if not (separator and name and path) or name in models:
            raise ValueError(MODELS_FORM)
        models[name] = path
    return models


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the memory that is free, in percent."""

    percent: float

    def __str__(self) -> str:
        return f"{self.percent:g}%"


def _parse_memory(value: object) -> object:
    """Bytes as ``_parse_bytes`` reads them, or ``40%`` as a ``Share``."""
    if isinstance(value, str) and value.strip().endswith("%"):
        value = Share(float(value.strip()[:-1]))
    if isinstance(value, Share):
        inside = 1 <= value.percent <= 95
    else:
        value = _parse_bytes(value)
        inside = isinstance(value, int) and _MEMORY_RANGE[0] <= value <= _MEMORY_RANGE[1]
    if not inside:
        raise ValueError(MEMORY_FORM)
    return value


def _parse_shares(value: object) -> object:
    """A mapping of task to weight, or ``generate=2,embed=1``; a task that is left out has the weight 1."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {name.strip(): weight for name, _, weight in pairs}
        if len(value) < len(pairs):
            raise ValueError(SHARES_FORM)
    if not isinstance(value, Mapping):
        raise ValueError(SHARES_FORM)
    if any(isinstance(weight, bool) for weight in value.values()):
        raise ValueError(SHARES_FORM)
    return dict.fromkeys(Task, 1.0) | {Task(name): weight for name, weight in value.items()}


def _check_inner_host(value: str) -> str:
    """An IPv6 address may have brackets around it, and has none from here on."""
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not bare or re.search(r"[\s/]", bare):
        raise ValueError(INNER_HOST_FORM)
    if ":" in bare:
        ipaddress.IPv6Address(bare)  # raises ValueError, as for localhost:80
    return bare


def _check_host(value: str) -> str:
    return value if re.fullmatch("unix:.+", value) else _check_inner_host(value)


def _check_address(value: str) -> str:
    """gRPC takes a port past the last one modulo 65536, and would listen somewhere else."""
    if not value or re.fullmatch("unix:.+", value):
        return value
    match = re.fullmatch(r"[^:\s].*:([0-9]{1,5})", value)
    if not match or int(match[1]) > 65535:
        raise ValueError(ADDRESS_FORM)
    return value


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Memory = Annotated[int | Share, BeforeValidator(_parse_memory)]
Weight = Annotated[float, Field(ge=0.01, le=100)]
TaskShares = Annotated[dict[Task, Weight], BeforeValidator(_parse_shares)]
Host = Annotated[str, AfterValidator(_check_host)]
InnerHost = Annotated[str, AfterValidator(_check_inner_host)]
Address = Annotated[str, AfterValidator(_check_address)]
Name = Annotated[str, Field(min_length=1)]
Models = Annotated[dict[Name, Name], BeforeValidator(_parse_models)]
