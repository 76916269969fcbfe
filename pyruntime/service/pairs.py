"""Two texts for one input: each tokenised by itself, then put into the tokenizer's frame for pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.inputs import InputLimits, Reading, read_inputs
from pyruntime.service.workers import TextWorkers
from pyruntime.telemetry.call_record import current_id
from pyruntime.tokenization import PairFrame
from pyruntime.types import ClassifyRequest
from pyruntime.v1 import common_pb2, score_pb2

Ids = list[int] | InvalidField


@dataclass(frozen=True)
class Encoded:
    """An input's ids and token types; None where the model reads none, or all of them are 0."""

    ids: list[int]
    types: list[int] | None = None

    def key(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Equal for inputs with equal answers."""
        return tuple(self.ids), None if self.types is None else tuple(self.types)


def num_ids(encoded: Sequence[Encoded | InvalidField]) -> int:
    """Token ids of the good inputs together."""
    return sum(len(each.ids) for each in encoded if isinstance(each, Encoded))


@dataclass(frozen=True)
class SecondLimit:
    """What happens to a second text that does not fit behind the first; the first is never cut.

    ``max_tokens``: of the second text, beside what the context leaves; None: what the context leaves.
    """

    truncation: common_pb2.Truncation
    max_tokens: int | None = None

    def fit(self, ids: list[int], room: int, field: str, num_kept: int = 0) -> list[int]:
        """At most ``room`` of ``ids``, cut where the client allows it; the first ``num_kept`` stay and do not count."""
        most = room if self.max_tokens is None else min(room, self.max_tokens)
        head, text = ids[:num_kept], ids[num_kept:]
        if len(text) <= most:
            return ids
        if most > 0 and self.truncation == common_pb2.TRUNCATION_RIGHT:
            return head + text[:most]
        if most > 0 and self.truncation == common_pb2.TRUNCATION_LEFT:
            return head + text[-most:]
        allowed = (
            f"at most {most} here unless truncation is set" if most > 0 else "none: no room is left in the context"
        )
        raise InvalidField(field, f"has {len(text)} tokens; allowed: {allowed}")


def pair_frame(model: ServedModel, field: str) -> PairFrame:
    """``InvalidField``, which names ``field``, for a model whose tokenizer puts nothing between two texts."""
    frame = model.tokenizer.pair_frame
    if frame is None:
        raise InvalidField(field, f"are not for model {model.info.name!r}: its tokenizer knows no pairs")
    return frame


async def read_pairs(
    workers: TextWorkers,
    model: ServedModel,
    pairs: Sequence[common_pb2.InputPair],
    limits: InputLimits,
    limit: SecondLimit,
) -> list[Encoded | InvalidField]:
    """Each of the request's ``pairs``, or what is wrong with it."""
    frame = pair_frame(model, "pairs")
    sides = []
    for side in ("first", "second"):
        reading = Reading("pairs", limits, suffix=f".{side}", special_tokens=False)
        sides.append(await read_inputs(workers, model, [getattr(pair, side) for pair in pairs], reading))
    total = sum(len(ids) for side in sides for ids in side if not isinstance(ids, InvalidField))
    return await workers.run(total, _join_all, model, frame, *sides, limit)


async def read_pair(
    workers: TextWorkers, model: ServedModel, pair: common_pb2.InputPair, limits: InputLimits
) -> Encoded:
    """A TokenizeRequest's ``pair``. Raises what is wrong with it."""
    try:
        (joined,) = await read_pairs(workers, model, [pair], limits, SecondLimit(common_pb2.TRUNCATION_NONE))
        if isinstance(joined, InvalidField):
            raise joined
        return joined
    except InvalidField as error:
        raise InvalidField(error.field.replace("pairs[0]", "pair").replace("pairs", "pair"), error.problem) from error


def _join_all(
    model: ServedModel, frame: PairFrame, firsts: Sequence[Ids], seconds: Sequence[Ids], limit: SecondLimit
) -> list[Encoded | InvalidField]:
    joined: list[Encoded | InvalidField] = []
    for place, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        try:
            joined.append(_within(model, frame, first, second, limit, f"pairs[{place}]"))
        except InvalidField as error:
            joined.append(error)
    return joined


def _within(model: ServedModel, frame: PairFrame, first: Ids, second: Ids, limit: SecondLimit, path: str) -> Encoded:
    """The pair within the model's context: the second text is cut, never the first."""
    for each in (first, second):
        if isinstance(each, InvalidField):
            raise each
    assert isinstance(first, list)
    assert isinstance(second, list)
    room = room_behind(model, frame, first, f"{path}.first")
    return join(model, frame, first, limit.fit(second, room, f"{path}.second"))


def join(model: ServedModel, frame: PairFrame, first: list[int], second: list[int]) -> Encoded:
    """The pair's ids, and its token types where the model is given some."""
    types = frame.types(len(first), len(second)) if model.tokenizer.reads_token_types else []
    return Encoded(frame.join(first, second), types if any(types) else None)


def room_behind(model: ServedModel, frame: PairFrame, first: list[int], field: str) -> int:
    """Tokens that remain for the second text: at least one, else ``InvalidField``."""
    most = model.info.context_length - frame.num_special - 1
    if len(first) > most:
        beside = f"beside {frame.num_special} special tokens in a context of {model.info.context_length}"
        problem = f"has {len(first)} tokens; allowed: at most {most} {beside}, so that the other text has room"
        raise InvalidField(field, problem)
    return most + 1 - len(first)


def classify_request(
    inputs: Sequence[Encoded], request: score_pb2.ClassifyRequest | score_pb2.RerankRequest
) -> ClassifyRequest:
    """For the engine, of texts or pairs that are put together."""
    types = [each.types or [0] * len(each.ids) for each in inputs]
    return ClassifyRequest(
        inputs=[each.ids for each in inputs],
        raw=request.raw_scores,
        token_type_ids=types if any(each.types for each in inputs) else None,
        priority=request.priority,
        request_id=current_id(),
    )
