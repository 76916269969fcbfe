"""Text through the whole service for each way of spelling it: a stream says what one decode of all tokens says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pyruntime.tokenization import Tokenizer
from pyruntime.types import FinishReason, TokenEvent
from pyruntime.v1 import generate_pb2
from tests.fakes import FakeStream
from tests.service import conftest
from tests.service.conftest import Stack
from tests.tokenizer_kinds import KINDS, make

N = 125
ROUNDS = 8
# Longer runs of byte tokens are given out before they end, and then can differ from a decode of all.
MOST_TOKENS = 30
PIECES = [
    *"aeiou !.,'\n\t",
    *["hello", " world", "stop", "END", "</s>", "<0x41>", "  ", "日本語", "é", "e\u0301\u0323", "ﬁ", "ß", "\ufffd"],
    *["🙂", "👩\u200d🔬", "🏳️\u200d🌈", "👍🏽", "🇩🇪", "שלום", "مرحبا\u064b", "\u202eabc\u202c", "क्षि", "ᚠᛇᚻ", "𝔘"],
    *["\u200b", "\x00"],
]


@dataclass
class Played:
    """One continuation: its tokens, the one that ends it included, and how it ends."""

    ids: list[int]
    ends_by_token: bool
    finish: FinishReason

    def text(self, tokenizer: Tokenizer) -> str:
        spelled = self.ids[:-1] if self.ends_by_token else self.ids
        return tokenizer._hf.decode(spelled, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def some_ids(tokenizer: Tokenizer, draw: random.Random) -> list[int]:
    """A text's tokens, any tokens at all, or the one cut into the other."""
    text = "".join(draw.choices(PIECES, k=draw.randrange(1, 9)))
    ids = tokenizer.encode(text, special_tokens=False)
    wild = [draw.randrange(tokenizer.vocab_size + 1) for _ in range(draw.randrange(1, 12))]
    kind, cut = draw.randrange(4), draw.randrange(len(ids) + 1)
    found = wild if kind == 0 else ids[:cut] + wild[:2] + ids[cut:] if kind == 1 else ids
    return found[:MOST_TOKENS] or wild


def some_plays(tokenizer: Tokenizer, draw: random.Random) -> list[Played]:
    plays = []
    for _ in range(N):
        ids, end = some_ids(tokenizer, draw), draw.randrange(3)
        plays.append(Played(ids, end == 0, FinishReason.LENGTH if end == 2 else FinishReason.STOP))
    return plays


def some_stops(texts: list[str], draw: random.Random) -> list[str]:
    """Parts of the texts, from their middles, their ends and whole; some the beginning of another; some not found."""
    stops = ["END", "stop.", "~"]
    for text in draw.sample([text for text in texts if text.strip("\ufffd")], 5):
        start = draw.randrange(len(text))
        stops.append(text[start : start + draw.randrange(1, 7)])
        stops += [text, text[-3:], stops[-1][: draw.randrange(1, 3)]][: draw.randrange(4)]
    return [stop for stop in stops if stop and len(stop.encode()) <= 100]


def stream_of(plays: list[Played], draw: random.Random) -> FakeStream:
    """Wake-ups of one to seven tokens each, in which not every continuation moves; like tokens, like numbers."""
    left = [(index, list(play.ids)) for index, play in enumerate(plays)]
    wakeups: list[list[TokenEvent]] = []
    while left:
        wakeups.append([])
        for index, ids in list(left):
            for _ in range(draw.randrange(8)):
                if ids:
                    wakeups[-1] += events_of(plays[index], index, ids.pop(0), not ids)
            if not ids:
                left.remove((index, ids))
    return FakeStream([events for events in wakeups if events])


def events_of(play: Played, index: int, token_id: int, is_last: bool) -> Iterator[TokenEvent]:
    numbers = {"logprob": -token_id / 8, "top": ((token_id, -0.5), (0, -token_id / 4)), "selected": (-1.0 - token_id,)}
    finish = play.finish if is_last else None
    if finish is FinishReason.STOP and not play.ends_by_token:  # as where a constraint lets nothing follow
        yield TokenEvent(index, token_id, None, **numbers)
        yield TokenEvent(index, None, finish)
    else:
        yield TokenEvent(index, token_id, finish, **numbers)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str]:
    """By definition: the stop string that is complete first, and of two the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, ""


def joined(chunks: list[generate_pb2.GenerateChunk], index: int) -> generate_pb2.Completion:
    own = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.finish_reason != 0 for chunk in own] == [False] * (len(own) - 1) + [True]
    return generate_pb2.Completion(
        index=index,
        text="".join(chunk.text for chunk in own),
        token_ids=[token for chunk in own for token in chunk.token_ids],
        logprobs=[entry for chunk in own for entry in chunk.logprobs],
        finish_reason=own[-1].finish_reason,
        matched_stop=own[-1].matched_stop,
    )


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ``stack``: messages that hold all of these continuations."""
    monkeypatch.setattr(conftest, "SETTINGS", conftest.SETTINGS.model_copy(update={"max_message_bytes": 2**22}))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_thousand_texts(roomy: None, stack: Stack, kind: str) -> None:
    """Unary and streamed, with chunks of 1, 3 and 100 tokens, stop strings of all sorts, and every kind of end."""
    tokenizer = stack.decoder.tokenizer = make(KINDS[kind]())
    draw, matches = random.Random(kind), 0
    for number in range(ROUNDS):
        plays = some_plays(tokenizer, draw)
        texts = [play.text(tokenizer) for play in plays]
        stops, include = some_stops(texts, draw) if number else [], number % 2 == 1
        request = generate_pb2.GenerateRequest(
            token_ids={"ids": [5]},
            n=N,
            chunk_tokens=(1, 3, 100)[number % 3],
            stop={"strings": stops, "include_stop_in_text": include},
            logprobs={"enabled": number < 2, "top": 2 * (number < 2)},
        )
        stack.engine.next_stream = stream_of(plays, draw)
        whole = await stack.generate.Generate(request)
        stack.engine.next_stream = stream_of(plays, draw)
        chunks = [chunk async for chunk in stack.generate.GenerateStream(request)]
        assert chunks[-1].usage == whole.usage
        for play, text, completion in zip(plays, texts, whole.completions, strict=True):
            assert (completion.text, completion.matched_stop) == cut(text, stops, include), (play, stops)
            assert joined(chunks, completion.index) == completion
            check_tokens(completion, play, kind, tokenizer)
            matches += completion.matched_stop != ""
    assert matches > N


def check_tokens(completion: generate_pb2.Completion, play: Played, kind: str, tokenizer: Tokenizer) -> None:
    """All tokens, or those up to the one that completes the stop string, each with its numbers."""
    ids = list(completion.token_ids)
    assert ids == play.ids[: len(ids)]
    assert [entry.token_id for entry in completion.logprobs] in ([], ids)
    assert [entry.logprob for entry in completion.logprobs] in ([], [-token_id / 8 for token_id in ids])
    if not completion.matched_stop:
        assert (ids, FinishReason[completion_end(completion)]) == (play.ids, play.finish)
        return
    assert completion_end(completion) == "STOP"
    spelled = play.text(tokenizer) if ids == play.ids else tokenizer.decode(ids)
    assert completion.matched_stop in spelled
    # A run of byte tokens is text once it has ended, and what has not ended yet decodes to U+FFFD.
    if "fallback" not in kind and "\ufffd" not in completion.matched_stop:
        assert completion.matched_stop not in tokenizer.decode(ids[:-1])


def completion_end(completion: generate_pb2.Completion) -> str:
    return generate_pb2.FinishReason.Name(completion.finish_reason).removeprefix("FINISH_REASON_")
