"""What the ways of reranking share: the request being served, its texts as token ids, one document's outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from pyruntime.control_tokens import ControlTokens
from pyruntime.errors import InvalidField, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.service.inputs import Reading, encode_text, read_inputs
from pyruntime.service.pairs import Ids, SecondLimit
from pyruntime.service.room import ServiceRoom
from pyruntime.service.validate import optional, text_bytes
from pyruntime.types import StepTiming
from pyruntime.v1 import common_pb2, score_pb2


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document's score and tokens."""

    score: float
    prompt_tokens: int
    cached_tokens: int = 0
    error: None = None


Outcomes: TypeAlias = tuple[list[Ranked | PyruntimeError], StepTiming]
"""One outcome a document, in the order of the request."""


@dataclass(frozen=True)
class RankJob:
    """One checked RerankRequest and what is needed to read it. ``instruction``: None where the model takes none."""

    room: ServiceRoom
    model: ServedModel
    request: score_pb2.RerankRequest
    instruction: str | None

    @property
    def limit(self) -> SecondLimit:
        """Of a document's tokens."""
        return SecondLimit(self.request.truncation, optional(self.request, "max_tokens_per_document"))

    async def read_query(self, prompt: str = "") -> list[int]:
        """The ids of the query behind ``prompt``, without special tokens. ``InvalidField`` when there are none."""
        text = prompt + self.request.query
        ids = await self.room.workers.run(text_bytes(text), encode_text, self.model, text, "query", False)
        if not ids:
            raise InvalidField("query", "has no tokens")
        return ids

    async def read_documents(
        self, prompt: str, before: list[int], after: list[int], room: int, control: ControlTokens | None = None
    ) -> list[Ids]:
        """Each document's ids behind ``prompt``, or what is wrong with it, between ``before`` and ``after``.

        ``room``: tokens for prompt and document. A document that is cut keeps its prompt whole. ``control``: whose
        names are text in documents, and tokens in the prompt.
        """
        workers = self.room.workers
        plain = Reading("documents", self.room.input_limits, text_suffix="", special_tokens=False)
        reading = replace(plain, prompt=prompt, control=control)
        inputs = [common_pb2.Input(text=text) for text in self.request.documents]
        read = await read_inputs(workers, self.model, inputs, reading)
        # A tokenizer may join a space at the prompt's end with the document's first word.
        start = await workers.run(text_bytes(prompt), encode_text, self.model, prompt.rstrip(), "documents", False)
        total = sum(len(each) for each in read if isinstance(each, list))
        return await workers.run(total, self._fit, read, start, before, after, room)

    def _fit(self, read: list[Ids], start: list[int], before: list[int], after: list[int], room: int) -> list[Ids]:
        """``start``: what the prompt's ids begin with."""
        fitted: list[Ids] = []
        for place, ids in enumerate(read):
            if isinstance(ids, InvalidField):
                fitted.append(ids)
                continue
            num_kept = len(start) if ids[: len(start)] == start else 0
            try:
                kept = self.limit.fit(ids, room - num_kept, f"documents[{place}]", num_kept)
            except InvalidField as error:
                fitted.append(error)
            else:
                fitted.append(before + kept + after)
        return fitted
