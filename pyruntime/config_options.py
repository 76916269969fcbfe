"""Options of the command line, the environment and a YAML file, made of the fields of a settings model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from pyruntime.config_values import (
    ADDRESS_FORM,
    FILE_FORM,
    HOST_FORM,
    INNER_HOST_FORM,
    MEMORY_FORM,
    MODELS_FORM,
    SHARES_FORM,
)

ENV_PREFIX = "PYRUNTIME_"


def flag(name: str) -> str:
    return "--model" if name == "models" else "--" + name.replace("_", "-")


class Options:
    """How each of ``fields`` is called, what it takes, and what is given for it."""

    def __init__(self, fields: Mapping[str, FieldInfo]) -> None:
        self._fields = fields

    def allowed(self, name: str) -> str:
        """What values the option ``name`` takes, in words."""
        field = self._fields[name]
        if field.annotation is bool:
            return "true or false"
        choices = get_args(field.annotation)
        if choices and all(isinstance(choice, str) for choice in choices):
            return "one of " + ", ".join(choices)
        low = next((m.ge for m in field.metadata if isinstance(m, annotated_types.Ge)), None)
        high = next((m.le for m in field.metadata if isinstance(m, annotated_types.Le)), None)
        if low is not None:
            return f"{low} to {high}" + (
                " bytes, with or without a unit as in 512MiB" if name.endswith("bytes") else ""
            )
        forms = {
            "models": MODELS_FORM,
            "host": HOST_FORM,
            "metrics_host": INNER_HOST_FORM,
            "device": "cpu, cuda or cuda:INDEX",
            "kv_cache_bytes": MEMORY_FORM,
            "task_shares": SHARES_FORM,
            "admin_address": ADDRESS_FORM,
            "otlp_endpoint": "http://HOST:PORT, https://HOST:PORT, or empty for what OTEL_ variables say",
        }
        return forms.get(name, FILE_FORM if field.default == "" else "a text that is not empty")

    def default(self, name: str) -> str:
        """The default of the option ``name``, in a form that it takes."""
        value = self._fields[name].default
        if isinstance(value, dict):
            return ",".join(f"{key.value}={weight:g}" for key, weight in value.items()) or "none"
        return "none" if value in ("", None) else str(value)

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog="server.py",
            usage="%(prog)s [OPTION ...]   (--help lists them)",
            description="Serves generation, embeddings and scores of the same models over gRPC.",
            epilog="Flags beat environment variables, those beat the YAML file. Empty variables count as unset.",
            formatter_class=argparse.RawTextHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--config", metavar="FILE", help=f"YAML file of options [env {ENV_PREFIX}CONFIG]")
        for name, field in self._fields.items():
            takes = f"({self.allowed(name)}) [default {self.default(name)}] [env {ENV_PREFIX}{name.upper()}]"
            text = f"{field.description}\n{takes}"
            options: dict[str, Any] = {"dest": name, "help": text.replace("%", "%%"), "default": None}
            if field.annotation is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif name == "models":
                options |= {"action": "append", "metavar": "NAME=PATH"}
            else:
                options["metavar"] = _metavar(name, field.annotation)
            parser.add_argument(flag(name), **options)
        return parser

    def from_environment(self, environ: Mapping[str, str]) -> dict[str, Any]:
        names = {name: environ.get(ENV_PREFIX + name.upper()) for name in self._fields}
        return {name: value for name, value in names.items() if value}

    def read_yaml(self, parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        # ValueError: text that is not UTF-8, dates and numbers that are none.
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            parser.error(f"--config: {path} cannot be read: {error}")
        if content is None:
            return {}
        if not isinstance(content, dict):
            parser.error(f"--config: {path} must be a mapping of option names to values")
        unknown = sorted(str(key) for key in content if key not in self._fields)
        if unknown:
            parser.error(f"--config: {path} has unknown keys {', '.join(unknown)}; known: {', '.join(self._fields)}")
        return content

    def explain(self, problem: Any, values: dict[str, Any], sources: dict[str, str]) -> str:
        name = str(problem["loc"][0])
        value = values[name]
        shown = ", ".join(map(str, value)) if isinstance(value, list) else repr(value)
        return f"{flag(name)}: {shown} from {sources[name]} is not allowed; allowed: {self.allowed(name)}"


def _metavar(name: str, kind: Any) -> str:
    """What ``--help`` shows for the value."""
    choices = get_args(kind)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    by_ending = {"_s": "SECONDS", "_bytes": "SIZE", "port": "PORT", "host": "HOST", "_address": "ADDRESS"}
    by_ending |= {"_shares": "TASK=WEIGHT,...", "_endpoint": "URL", "device": "DEVICE"}
    found = next((word for ending, word in by_ending.items() if name.endswith(ending)), None)
    return found or ("FILE" if kind is str else "NUMBER")
