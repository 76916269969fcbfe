"""Stop strings: found whatever the text is cut into, and never let out in part."""

from __future__ import annotations

import random

import pytest

from pyruntime.detokenization import StopMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
    return out + matcher.flush(), matched


def by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end of any stop string, the longest stop that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_any_cut_of_a_text_gives_what_the_definition_gives(include: bool) -> None:
    draw = random.Random(1)
    matches = 0
    for _ in range(3000):
        text = "".join(draw.choices("ab ", k=draw.randrange(0, 14)))
        stops = ["".join(draw.choices("ab ", k=draw.randrange(1, 6))) for _ in range(draw.randrange(0, 4))]
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(0, 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = by_definition(text, stops, include)
        assert run(pieces, stops, include) == expected, (pieces, stops)
        matches += expected[1] is not None
    assert matches > 500


def test_nothing_of_a_possible_stop_comes_out_early() -> None:
    matcher = StopMatcher(["END"], include=False)
    assert matcher.push("so E") == ("so ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("T ") == ("ENT ", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.push("D and on") == ("", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["\n\n"], include=False)
    assert matcher.push("a\n") == ("a", None)
    assert matcher.flush() == "\n"


def test_without_stops_all_text_passes() -> None:
    assert run(["a", "", "b"], []) == ("ab", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""], include=False)
