"""docs/api.md is what the protos and the errors say now, complete and without a dead link."""

from __future__ import annotations

import re

import pytest

from tools import api_reference


@pytest.fixture(scope="module")
def text() -> str:
    return api_reference.render()


def test_the_file_is_current(text: str):
    assert api_reference.TARGET.read_text(encoding="utf-8") == text, "run: python tools/api_reference.py"


def test_every_link_has_its_heading(text: str):
    headings = {re.sub(r"[^\w-]", "", line.lstrip("# ").lower()) for line in text.splitlines() if line.startswith("#")}
    links = set(re.findall(r"\(#([^)]+)\)", text))
    assert links
    assert links <= headings


def test_nothing_is_without_a_meaning(text: str):
    assert not re.findall(r"\| +\|$", text, re.MULTILINE)
    assert not re.findall(r"^#+ .*\n\n\n", text, re.MULTILINE)


@pytest.mark.parametrize(
    "line",
    [
        "### GenerateService.GenerateStream",
        "[GenerateRequest](#generaterequest) → stream of [GenerateChunk](#generatechunk)",
        "stream of [EmbedRequest](#embedrequest) → stream of [EmbedResponse](#embedresponse)",
        "| `logit_bias` | map of uint32 to float | Added to the logits of these tokens",
        "| `seed` | optional uint64 | ",
        "| `strings` | repeated string | ",
        "| `text` | string | *One of `prompt`.* ",
        "| `messages` | repeated [Chat.Message](#chatmessage) | ",
        "| `FINISH_REASON_STOP` | 1 | ",
        "| RESOURCE_EXHAUSTED | `OVERLOADED` | The queue is full. |",
    ],
)
def test_samples(text: str, line: str):
    assert any(each.startswith(line) for each in text.splitlines())
