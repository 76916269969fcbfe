"""Stand-ins for a model: an engine that answers from a script, and a small real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from pyruntime.admission import Admission, Ticket
from pyruntime.errors import ComputeFault, PyruntimeError
from pyruntime.registry import GenerationDefaults, ServedModel
from pyruntime.tokenization import Tokenizer
from pyruntime.types import (
    Capability,
    ClassifyRequest,
    ClassifyResult,
    EmbeddingKind,
    EmbedRequest,
    EmbedResult,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    PoolingType,
    ScoreRequest,
    ScoreResult,
    SparseVector,
    StepTiming,
    TokenEvent,
)

BOS, EOS, MARK = 256, 257, 258
VOCAB = 259
POISON = 0  # a token whose vector and scores are not finite
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}bot:{{ mood | default('') }}{% endif %}"
)


def byte_tokenizer(*, chat: bool = True) -> Tokenizer:
    """Every byte is a token, ids 0-255 by value; <s> is put before a text. <extra> is an id that the model lacks."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<mark>", special=False)])
    backend.add_special_tokens([AddedToken("<extra>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = CHAT_TEMPLATE if chat else None
    return Tokenizer(hf)


@dataclass
class FakeStream:
    """Plays wake-ups of events; ``hold`` makes it wait, before the wake-up of that number, until it is cancelled."""

    wakeups: list[list[TokenEvent]]
    hold: int | None = None
    error: PyruntimeError | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: list[int | None] = field(default_factory=list)
    num_taken: int = 0
    on_change: Callable[[], None] = lambda: None
    holding: asyncio.Future[bool] | None = None

    def listen(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change

    def take(self) -> list[TokenEvent] | None:
        self.started.set()
        while self.num_taken < len(self.wakeups):
            if self.num_taken == self.hold and not self.stopped.is_set():
                self.holding = asyncio.ensure_future(self.stopped.wait())
                self.holding.add_done_callback(lambda _: self.on_change())
                return None
            events = self.wakeups[self.num_taken]
            self.num_taken += 1
            if kept := [event for event in events if event.index not in self.cancelled]:
                return kept
        if self.error is not None:
            raise self.error
        return []

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        self.listen(lambda: None)
        while (events := self.take()) != []:
            if events is None:
                await self.stopped.wait()
            else:
                yield events

    def cancel(self, index: int | None = None) -> None:
        self.cancelled.append(index)
        if index is None:
            self.stopped.set()

    def timing(self) -> StepTiming:
        return StepTiming(queue_s=0.25, compute_s=0.5)


class FakeEngine:
    """Records requests. ``refusal`` is raised by every method; ``block`` holds Embed and Score until cancelled."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.admission = Admission(info.name, max_requests=1024, max_tokens=2**20)
        self.admit = self.admission.admit
        self.generated: list[GenerateRequest] = []
        self.embedded: list[EmbedRequest] = []
        self.at_once: list[bool] = []
        self.scored: list[ScoreRequest] = []
        self.classified: list[ClassifyRequest] = []
        self.streams: list[FakeStream] = []
        self.refusal: Exception | None = None
        self.on_failed: Callable[[str], None] | None = None
        self.turned_away: PyruntimeError | None = None
        self.next_stream: FakeStream | None = None
        self.block = False
        self.blocked = asyncio.Event()
        self.unblocked = asyncio.Event()
        self.arrived = asyncio.Event()

    def generate(self, request: GenerateRequest, *, ticket: Ticket | None = None) -> FakeStream:
        self._refuse()
        self.generated.append(request)
        stream = self.next_stream or play("ok", n=request.n)
        stream.num_taken = 0
        self.streams.append(stream)
        self.arrived.set()
        return stream

    async def embed(
        self, request: EmbedRequest, *, ticket: Ticket | None = None, at_once: bool = False
    ) -> tuple[list[EmbedResult], StepTiming]:
        self._refuse()
        self.embedded.append(request)
        self.at_once.append(at_once)
        await self._maybe_block()
        results = []
        for ids in request.inputs:
            error = ComputeFault("not finite") if POISON in ids else None
            results.append(EmbedResult(values_of(ids, request), len(ids), 0, error))
        return results, StepTiming(0.1, 0.2)

    async def score(
        self, request: ScoreRequest, *, ticket: Ticket | None = None
    ) -> tuple[list[ScoreResult], StepTiming]:
        self._refuse()
        self.scored.append(request)
        await self._maybe_block()
        results = []
        for place, item in enumerate(request.items):
            ids = request.prefix + item
            error = ComputeFault("not finite") if POISON in item else None
            scores = [1 / (1 + len(item) + label) for label in request.label_ids]
            results.append(ScoreResult(scores, len(ids), len(request.prefix) if place else 0, error))
        return results, StepTiming(0.1, 0.2)

    async def classify(
        self, request: ClassifyRequest, *, ticket: Ticket | None = None
    ) -> tuple[list[ClassifyResult], StepTiming]:
        self._refuse()
        self.classified.append(request)
        await self._maybe_block()
        results = []
        for ids in request.inputs:
            error = ComputeFault("not finite") if POISON in ids else None
            whole, count = request.prefix + ids, len(self.info.labels)
            scores = vector_of(whole, count)
            if self.info.classifies_tokens:
                scores = np.stack([vector_of(whole[: place + 1], count) for place in range(len(whole))])
            scores = scores if request.raw else 1 / (1 + np.exp(-scores))
            results.append(ClassifyResult(scores, len(whole), 0, error))
        return results, StepTiming(0.1, 0.2)

    def probe(self, answer: Callable[[], None]) -> None:
        answer()

    def turn_away(self, error: PyruntimeError) -> None:
        self.turned_away = error

    def close(self) -> None:
        pass

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def _maybe_block(self) -> None:
        if self.block:
            self.blocked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.unblocked.set()


def vector_of(ids: list[int], dimensions: int) -> np.ndarray:
    """A vector that depends on every id."""
    return np.random.default_rng(ids).standard_normal(dimensions).astype(np.float32)


def values_of(ids: list[int], request: EmbedRequest) -> object:
    """An embedding of the kind that is asked for."""
    if request.kind is EmbeddingKind.DENSE:
        return vector_of(ids, request.dimensions)
    if request.kind is EmbeddingKind.PER_TOKEN:
        return np.stack([vector_of(ids[: place + 1], request.dimensions) for place in range(len(ids))])
    present = np.unique(np.array(ids, np.int64))
    return SparseVector(present, (1 + present / 4).astype(np.float32))


def play(text: str | bytes, *, n: int = 1, per_wakeup: int = 1, end: int | None = None, cached: int = 0) -> FakeStream:
    """The bytes of ``text`` as tokens of every continuation; then token ``end``, or a finish by length."""
    ids = list(text.encode() if isinstance(text, str) else text)
    ids += [end] if end is not None else []
    reason = FinishReason.LENGTH if end is None else FinishReason.STOP
    wakeups: list[list[TokenEvent]] = []
    for start in range(0, len(ids), per_wakeup):
        events = []
        for place in range(start, min(start + per_wakeup, len(ids))):
            finish = reason if place == len(ids) - 1 else None
            events += [TokenEvent(index, ids[place], finish, cached) for index in range(n)]
        wakeups.append(events)
    return FakeStream(wakeups)


def fake_model(name: str, capabilities: set[Capability], **changes: object) -> ServedModel:
    facts: dict = {
        "name": name,
        "architecture": "FakeForCausalLM",
        "dtype": "float32",
        "device": "cpu",
        "capabilities": frozenset(capabilities),
        "context_length": 64,
        "vocab_size": VOCAB,
        "embedding_dimensions": 12,
        "default_pooling": PoolingType.MEAN,
        "normalize_default": True,
        "prompts": {"query": "q: "},
    }
    info = ModelInfo(**facts | changes)
    defaults = GenerationDefaults(eos_token_ids=frozenset({EOS}))
    return ServedModel(info, FakeEngine(info), byte_tokenizer(), defaults)  # type: ignore[arg-type]
