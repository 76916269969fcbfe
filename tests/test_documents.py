"""What the documents tell a reader to follow, type or call is there: links, options, targets, commands and requests."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory

from pyruntime import config
from pyruntime.client import Client, arguments, options
from pyruntime.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2  # noqa: F401  fills the pool

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], key=str)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
# Of programs of others that the documents name.
FOREIGN = {
    "--ignore-scripts", "--protocol", "--http2-prior-knowledge", "--read-only", "--tmpfs", "--rm", "--help",
}  # fmt: skip


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose_of(name: str) -> str:
    return re.sub(r"^```.*?^```", "", text_of(name), flags=re.M | re.S)


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(name), re.M | re.S)


def anchors(name: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(name), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(name)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(str(found.resolve().relative_to(ROOT))), f"{name}: {target}"


def known_options() -> set[str]:
    parsers = [config.OPTIONS.parser(), *arguments.parser()._subparsers._group_actions[0].choices.values()]  # type: ignore[union-attr]
    return {option for parser in parsers for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("name", NAMES)
def test_options_and_targets_exist(name: str):
    known = known_options() | FOREIGN
    for option in re.findall(r"`(--[a-z][a-z0-9-]+)", prose_of(name)):
        sources = "".join(
            path.read_text() for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")
        )
        assert option in known or f'"{option}"' in sources, f"{name}: {option}"
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text_of(name), re.M):
        assert target in targets, f"{name}: make {target}"


def commands(name: str) -> list[list[str]]:
    """The words of each command of the shell blocks and of the code in the prose."""
    lines = [line for block in blocks(name, "sh") for line in block.replace("\\\n", " ").splitlines()]
    joined, found = "", []
    for line in lines:
        joined += line + "\n"
        try:
            found.append(shlex.split(joined, comments=True))
        except ValueError:  # a quoted text goes on in the next line
            continue
        joined = ""
    assert not joined, f"{name}: {joined}"
    inline = re.findall(r"`((?:\.venv/bin/)?pyruntime [a-z]+[^`]*)`", prose_of(name))
    return [words for words in [*found, *map(shlex.split, inline)] if words]


@pytest.mark.parametrize("name", ["README.md", "docs/clients.md", "docs/operations.md"])
def test_commands_are_understood(name: str):
    for words in commands(name):
        program = Path(words[0]).name
        if program == "pyruntime" and "--help" not in words:
            ends = next((place for place, word in enumerate(words) if word in ("<", ">", "|")), len(words))
            arguments.parser().parse_args(words[1:ends])
        if program in ("grpcurl", "buf") and "-d" in words:
            method = next(word for word in words[1:] if "pyruntime.v1." in word)
            service, _, called = method[method.index("pyruntime.v1.") :].partition("/")
            kind = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(called).input_type
            json_format.ParseDict(json.loads(words[words.index("-d") + 1]), message_factory.GetMessageClass(kind)())


OPTIONS = {
    "generate": "GenerateOptions", "complete": "GenerateOptions", "stream": "GenerateOptions",
    "stream_chunks": "GenerateOptions", "embed": "EmbedOptions", "embed_stream": "EmbedOptions",
    "embed_many": "EmbedOptions", "score": "ScoreOptions", "score_many": "ScoreOptions",
    "rerank": "RerankOptions", "classify": "ClassifyOptions",
}  # fmt: skip


@pytest.mark.parametrize("name", ["README.md", "docs/clients.md"])
def test_python_calls_what_the_client_has(name: str):
    calls = [
        node
        for block in blocks(name, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "client"
    ]
    assert calls
    for call in calls:
        method = call.func.attr  # type: ignore[attr-defined]
        taken = set(inspect.signature(getattr(Client, method)).parameters)
        taken |= getattr(options, OPTIONS[method]).__annotations__.keys()
        assert {keyword.arg for keyword in call.keywords} <= taken, ast.unparse(call)


def test_the_front_page_has_no_figure_of_its_own():
    """Each comparison and time in it stands in the log of performance, by the digits that stand there."""
    log = text_of("docs/performance.md")
    figures = re.findall(r"(\d[\d.,]*)(?: ×| ms\b| texts/s| tokens/s| items/s)", text_of("README.md"))
    assert figures
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", log), figure
