"""One frozen settings model. Flags beat environment, environment beats the YAML file, that beats defaults.

A field ``max_batch_tokens`` is the flag ``--max-batch-tokens``, the variable ``PYRUNTIME_MAX_BATCH_TOKENS``
and the YAML key ``max_batch_tokens``; the flag of ``models`` is ``--model NAME=PATH``, repeatable. A bad
value ends the program with exit code 2 and a message naming the option, its source and what is allowed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import annotated_types
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from pyruntime.types import Task

ENV_PREFIX = "PYRUNTIME_"
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MODELS_FORM = "NAME=PATH pairs, each name once"
_BYTES_FORM = "a number of bytes, or one with a unit, as 512MiB or 2GiB"
_MEMORY_RANGE = (2**20, 2**44)
_MEMORY_FORM = f"{_MEMORY_RANGE[0]} to {_MEMORY_RANGE[1]} bytes, with or without a unit as in 512MiB, or 1% to 95%"
_SHARES_FORM = "TASK=WEIGHT pairs of generate, embed, score and classify, each once, weights 0.01 to 100"
_ADDRESS_FORM = "HOST:PORT, unix:PATH, or empty for none; ports 0 to 65535"


def _parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    # More digits than any size has would be infinite as a float.
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(_BYTES_FORM)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parse_models(value: object) -> object:
    """A mapping as it is; ``NAME=PATH`` strings, in a list or joined by commas, as a mapping."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, list):
        raise ValueError(_MODELS_FORM)
    models: dict[str, str] = {}
    for pair in value:
        name, separator, path = str(pair).partition("=")
        name, path = name.strip(), path.strip()
        if not (separator and name and path) or name in models:
            raise ValueError(_MODELS_FORM)
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
        raise ValueError(_MEMORY_FORM)
    return value


def _parse_shares(value: object) -> object:
    """A mapping of task to weight, or ``generate=2,embed=1``; a task that is left out has the weight 1."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {name.strip(): weight for name, _, weight in pairs}
        if len(value) < len(pairs):
            raise ValueError(_SHARES_FORM)
    if not isinstance(value, Mapping):
        raise ValueError(_SHARES_FORM)
    if any(isinstance(weight, bool) for weight in value.values()):
        raise ValueError(_SHARES_FORM)
    return dict.fromkeys(Task, 1.0) | {Task(name): weight for name, weight in value.items()}


def _check_address(value: str) -> str:
    """gRPC takes a port past the last one modulo 65536, and would listen somewhere else."""
    if not value or re.fullmatch("unix:.+", value):
        return value
    match = re.fullmatch(r"[^:\s].*:([0-9]{1,5})", value)
    if not match or int(match[1]) > 65535:
        raise ValueError(_ADDRESS_FORM)
    return value


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Memory = Annotated[int | Share, BeforeValidator(_parse_memory)]
Weight = Annotated[float, Field(ge=0.01, le=100)]
TaskShares = Annotated[dict[Task, Weight], BeforeValidator(_parse_shares)]
Address = Annotated[str, AfterValidator(_check_address)]
Name = Annotated[str, Field(min_length=1)]
Models = Annotated[dict[Name, Name], BeforeValidator(_parse_models)]


class Settings(BaseModel):
    """What the server runs with. Sizes in bytes, times in seconds; 0 threads means every core."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Models = Field({}, description="a model to serve: a name and a folder, hub name or .gguf file")
    demo: bool = Field(False, description="serve the two demo models as well")
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of weights; auto: the model's own")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:INDEX")
    threads: int = Field(0, ge=0, le=4096, description="compute threads, within the cores that may be used; 0: all")
    deterministic: bool = Field(False, description="same bits whatever shares the batch; slower on long prompts")
    max_batch_tokens: int = Field(2048, ge=1, le=2**20, description="most tokens in one forward step")
    max_prompt_tokens_beside: int = Field(256, ge=1, le=2**20, description="of them for prompts while streams run")
    max_pause_factor: float = Field(
        3.0, ge=0, le=1000, description="longest step beside streams, in usual ones; 0: any"
    )
    max_running_sequences: int = Field(256, ge=1, le=2**16, description="most sequences in the batch at once")
    max_queue_requests: int = Field(1024, ge=1, le=2**20, description="waiting requests past which one is refused")
    max_queue_tokens: int = Field(
        2**20, ge=1, le=2**32, description="tokens of waiting requests past which one is refused"
    )
    priority_ageing_s: float = Field(
        30.0, ge=0, le=86400, description="seconds of waiting worth a priority class; 0: none"
    )
    task_shares: TaskShares = Field(dict.fromkeys(Task, 1.0), description="weights of the tasks when all have work")
    stream_buffer_tokens: int = Field(
        256, ge=1, le=2**20, description="tokens unread by a client past which its stream waits"
    )
    kv_cache_bytes: Memory = Field(
        2**30, description="key/value cache of each decoder; in %: of the memory that weights leave, for all together"
    )
    prefix_cache: bool = Field(True, description="keep the keys and values of earlier prompts for later ones")
    kv_block_size: int = Field(16, ge=1, le=1024, description="tokens in one cache block")
    max_message_bytes: Bytes = Field(64 * 2**20, ge=2**10, le=2**31 - 1, description="largest gRPC message")
    max_inputs_per_request: int = Field(2048, ge=1, le=2**20, description="most inputs, items or documents a request")
    max_labels_per_request: int = Field(4096, ge=1, le=2**20, description="most labels of a Score request")
    max_scores_per_request: int = Field(2**20, ge=1, le=2**28, description="most items x labels of a Score request")
    max_text_bytes: Bytes = Field(2**20, ge=1, le=2**31 - 1, description="longest single text, in UTF-8 bytes")
    max_request_text_bytes: Bytes = Field(8 * 2**20, ge=1, le=2**31 - 1, description="all texts of a request together")
    drain_grace_s: float = Field(30.0, ge=0, le=3600, description="seconds that running requests get at shutdown")
    admin_address: Address = Field("", description="listener of AdminService alone")
    self_check: bool = Field(True, description="compare each model with its eager reference before serving it")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        """YAML's ``port: yes`` is a mistake, which pydantic would read as the number 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are not allowed here")
        return value

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """Settings from command-line arguments (without the program's name), environment and YAML file.

        Prints a message and raises ``SystemExit(2)`` on an unknown option or key, or a bad value.
        """
        parser = _parser()
        flags = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
        config = flags.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
        values, sources = dict[str, Any](), dict[str, str]()
        for source, found in (
            (f"the file {config}", _read_yaml(parser, config) if config else {}),
            ("the environment", _from_environment(environ)),
            ("the command line", flags),
        ):
            values |= found
            sources |= dict.fromkeys(found, source)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            parser.error("\n  ".join(_explain(problem, values, sources) for problem in error.errors()))


def allowed(name: str) -> str:
    """What values the option ``name`` takes, in words."""
    field = Settings.model_fields[name]
    if field.annotation is bool:
        return "true or false"
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "one of " + ", ".join(choices)
    low = next((m.ge for m in field.metadata if isinstance(m, annotated_types.Ge)), None)
    high = next((m.le for m in field.metadata if isinstance(m, annotated_types.Le)), None)
    if low is not None:
        return f"{low} to {high}" + (" bytes, with or without a unit as in 512MiB" if name.endswith("bytes") else "")
    forms = {
        "models": _MODELS_FORM,
        "device": "cpu, cuda or cuda:INDEX",
        "kv_cache_bytes": _MEMORY_FORM,
        "task_shares": _SHARES_FORM,
        "admin_address": _ADDRESS_FORM,
    }
    return forms.get(name, "a text that is not empty")


def default(name: str) -> str:
    """The default of the option ``name``, in a form that it takes."""
    value = Settings.model_fields[name].default
    if isinstance(value, dict):
        return ",".join(f"{key.value}={weight:g}" for key, weight in value.items()) or "none"
    return "none" if value == "" else str(value)


def _flag(name: str) -> str:
    return "--model" if name == "models" else "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="server.py",
        description="Serves generation, embeddings and scores of the same models over gRPC.",
        epilog="Flags beat environment variables, those beat the YAML file. Empty variables count as unset.",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of options [env {ENV_PREFIX}CONFIG]")
    for name, field in Settings.model_fields.items():
        text = f"{field.description}\n({allowed(name)}) [default {default(name)}] [env {ENV_PREFIX}{name.upper()}]"
        options: dict[str, Any] = {"dest": name, "help": text.replace("%", "%%"), "default": None}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif name == "models":
            options |= {"action": "append", "metavar": "NAME=PATH"}
        else:
            options["metavar"] = name.rsplit("_", 1)[-1].upper()
        parser.add_argument(_flag(name), **options)
    return parser


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {name: environ.get(ENV_PREFIX + name.upper()) for name in Settings.model_fields}
    return {name: value for name, value in names.items() if value}


def _read_yaml(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    # ValueError: text that is not UTF-8, dates and numbers that are none.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        parser.error(f"--config: {path} cannot be read: {error}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        parser.error(f"--config: {path} must be a mapping of option names to values")
    unknown = sorted(str(key) for key in content if key not in Settings.model_fields)
    if unknown:
        parser.error(
            f"--config: {path} has unknown keys {', '.join(unknown)}; known: {', '.join(Settings.model_fields)}"
        )
    return content


def _explain(problem: Any, values: dict[str, Any], sources: dict[str, str]) -> str:
    name = str(problem["loc"][0])
    value = values[name]
    shown = ", ".join(map(str, value)) if isinstance(value, list) else repr(value)
    return f"{_flag(name)}: {shown} from {sources[name]} is not allowed; allowed: {allowed(name)}"
