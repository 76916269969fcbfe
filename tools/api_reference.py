"""Write docs/api.md from the protos and the errors: python tools/api_reference.py [--check]

``--check`` writes nothing and exits with 1 when the file is not what would be written.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyruntime import errors
from pyruntime.service.status import code_of
from tools.lint_protos import compile_image

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api.md"
PACKAGE = "pyruntime.v1"
# Files as they are read: what one asks for first, what all share last.
ORDER = ["generate", "embed", "score", "model", "admin", "common"]

_HEAD = """\
# API reference

Made by `python tools/api_reference.py` from `proto/pyruntime/v1` and `pyruntime/errors.py`; not edited by hand. How to
call it from each language: [clients.md](clients.md).

Everything is in the package `pyruntime.v1`. *optional* in a type means that unset differs from zero. The server also
has `grpc.health.v1.Health` and, unless switched off, `grpc.reflection.v1` and `v1alpha`.
"""
_ERRORS = """\
## Errors

A failed call ends with a gRPC code and, in the trailer `grpc-status-details-bin`, a `google.rpc.Status` with details:

- `ErrorInfo`, always: a stable `reason`, as below, and the domain `pyruntime`
- `RequestInfo`, of calls: the id under which the server's log knows the call, as in the trailer `x-request-id`
- `BadRequest`, with INVALID_ARGUMENT: the path of each bad field and what is wrong with it
- `RetryInfo`, where a later try may succeed: when. The trailer `grpc-retry-pushback-ms` says the same to gRPC's own
  retries, which do not read details

An item of a batch that failed alone carries the same `google.rpc.Status` in its `error`.

| code | reason | when |
| --- | --- | --- |
"""
# Seen by the operator alone, or never.
_INWARD = {errors.ModelLoadError, errors.PyruntimeError}
_NUMBERS = FieldDescriptorProto.Type


class Comments:
    """A file's comments by the path of what they stand before."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}

    def of(self, *path: int) -> str:
        """As one line for a table, or a paragraph."""
        lines = [line.strip() for line in self._by_path.get(path, "").strip().splitlines()]
        return " ".join(lines)


def render() -> str:
    """The whole reference."""
    files = {file.name: file for file in _image().file}
    ordered = [files.pop(f"pyruntime/v1/{name}.proto") for name in ORDER]
    ordered += [file for name, file in sorted(files.items()) if file.package == PACKAGE]
    parts = [_HEAD, "".join(_contents(ordered)), _ERRORS + "".join(_error_rows())]
    for file in ordered:
        parts += _file(file)
    return "\n".join(parts)


def _image() -> FileDescriptorSet:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "image.binpb"
        compile_image(target)
        return FileDescriptorSet.FromString(target.read_bytes())


def _contents(files: Sequence[FileDescriptorProto]) -> Iterator[str]:
    yield "| service | methods |\n| --- | --- |\n"
    for file in files:
        for service in file.service:
            methods = ", ".join(_link(f"{service.name}.{method.name}", method.name) for method in service.method)
            yield f"| {_link(service.name)} | {methods} |\n"


def _error_rows() -> Iterator[str]:
    """Of each reason, which several kinds may share, the first kind's meaning."""
    rows = {("INTERNAL", "INTERNAL"): "Something unforeseen; the server's log has it under the call's request id."}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PyruntimeError) and kind not in _INWARD:
            rows.setdefault((code_of(kind.__new__(kind)).name, kind.reason), _first(kind))
    for (code, reason), when in sorted(rows.items()):
        yield f"| {code} | `{reason}` | {when} |\n"


def _first(kind: type) -> str:
    """The docstring in a line, without what it says of attributes."""
    text = " ".join((kind.__doc__ or "").split()).replace("``", "`")
    return re.split(r"[.;] `", text)[0].rstrip(".") + "."


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = Comments(file)
    for index, service in enumerate(file.service):
        yield f"## {service.name}\n\n{comments.of(6, index)}\n"
        for place, method in enumerate(service.method):
            yield f"### {service.name}.{method.name}\n"
            asked = ("stream of " if method.client_streaming else "") + _link(_short(method.input_type))
            answered = ("stream of " if method.server_streaming else "") + _link(_short(method.output_type))
            yield f"{asked} → {answered}\n\n{comments.of(6, index, 2, place)}\n"
    if not file.service:
        yield "## Shared messages\n"
    for index, message in enumerate(file.message_type):
        yield from _message(message, comments, (4, index), message.name)
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (5, index), enum.name)


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...], name: str) -> Iterator[str]:
    yield f"### {name}\n\n{comments.of(*path)}\n"
    if message.field:
        rows = ["| field | type | meaning |", "| --- | --- | --- |"]
        for index, field in enumerate(message.field):
            meaning = comments.of(*path, 2, index)
            if field.HasField("oneof_index") and not field.proto3_optional:
                meaning = f"*One of `{message.oneof_decl[field.oneof_index].name}`.* {meaning}"
            rows.append(f"| `{field.name}` | {_type(field, message)} | {_cell(meaning)} |")
        yield "\n".join(rows) + "\n"
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, comments, (*path, 3, index), f"{name}.{nested.name}")
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, 4, index), f"{name}.{enum.name}")


def _enum(enum: Any, comments: Comments, path: tuple[int, ...], name: str) -> Iterator[str]:
    yield f"### {name}\n\n{comments.of(*path)}\n"
    rows = ["| value | number | meaning |", "| --- | --- | --- |"]
    for index, value in enumerate(enum.value):
        rows.append(f"| `{value.name}` | {value.number} | {_cell(comments.of(*path, 2, index))} |")
    yield "\n".join(rows) + "\n"


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    ending = f".{message.name}."
    entries = (each for each in message.nested_type if field.type_name.endswith(ending + each.name))
    entry = next(entries, None)
    if entry is not None and entry.options.map_entry:
        key, value = entry.field
        return f"map of {_type(key, entry)} to {_type(value, entry)}"
    own = _NUMBERS.Name(field.type).removeprefix("TYPE_").lower()
    name = _link(_short(field.type_name)) if field.type_name else own
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _short(name: str) -> str:
    """``.pyruntime.v1.Chat.Message`` as ``Chat.Message``; names of other packages whole."""
    return name.removeprefix(".").removeprefix(f"{PACKAGE}.")


def _link(name: str, shown: str = "") -> str:
    if name.startswith("google."):
        return f"`{name}`"
    return f"[{shown or name}](#{name.lower().replace('.', '')})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is not current: python tools/api_reference.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
