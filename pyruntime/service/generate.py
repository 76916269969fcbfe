"""GenerateService: continue a prompt, whole or streamed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from pyruntime.constraints.grammar import ConstraintText
from pyruntime.errors import InvalidField, ResponseTooLarge
from pyruntime.jobs.generate import TokenStream
from pyruntime.registry import ServedModel
from pyruntime.service.chat import chat_bytes
from pyruntime.service.chunks import (
    FINISH_PB,
    ChunkFeed,
    Gatherer,
    check_prompt_logprobs,
    prompt_messages,
    token_logprob,
)
from pyruntime.service.completion import Continuations, Piece, Progress, TextRules, pieces
from pyruntime.service.convert import Stopwatch
from pyruntime.service.inputs import read_prompt
from pyruntime.service.outlet import Outlet
from pyruntime.service.room import RequestSize, ServiceRoom
from pyruntime.service.validate import (
    MAX_STOP_TOKENS,
    check_count,
    check_generate,
    check_token_ids,
    optional,
    read_sampling,
    text_bytes,
)
from pyruntime.telemetry.call_record import current_id
from pyruntime.types import Capability, GenerateRequest, PromptLogprobs, StopParams, Task
from pyruntime.v1 import common_pb2, generate_pb2, generate_pb2_grpc

if TYPE_CHECKING:
    from pyruntime.admission import Ticket
    from pyruntime.constraints.matcher import Constraint


@dataclass
class Run:
    """A checked request on its way through the engine."""

    model: ServedModel
    job: GenerateRequest
    rules: TextRules
    watch: Stopwatch = field(default_factory=Stopwatch)
    progress: Progress = field(default_factory=Progress)

    def usage(self) -> common_pb2.Usage:
        return common_pb2.Usage(
            prompt_tokens=len(self.job.prompt),
            completion_tokens=self.progress.num_tokens,
            cached_tokens=self.progress.cached_tokens,
        )

    @contextlib.contextmanager
    def stream(self, context: grpc.aio.ServicerContext, ticket: Ticket) -> Iterator[TokenStream]:
        """The engine's stream; however the call ends, the engine stops working on it."""
        stream = self.model.engine.generate(self.job, ticket=ticket)
        # The callback covers a call that ends while its handler waits for something else than the stream.
        context.add_done_callback(lambda _: stream.cancel())  # type: ignore[arg-type]
        try:
            yield stream
        finally:
            self.watch.ended(stream.timing(), self.usage())
            stream.cancel()


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """Validates, tokenises, hands to the engine, turns tokens into text."""

    def __init__(self, room: ServiceRoom) -> None:
        self._room = room

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb2.GenerateResponse:
        async with self._prepared(request, context, is_unary=True) as (run, stream):
            parts = _Parts(run.job.n, self._room.settings.max_message_bytes)
            prompt: list[generate_pb2.TokenLogprob] = []
            async for moved, progress in pieces(stream, run.model, run.job.n, run.rules):
                run.progress = progress
                found = next((piece.prompt for piece in moved if piece.prompt is not None), None)
                prompt += [entry for part in await self._prompt_parts(run, found) for entry in part]
                for piece in moved:
                    parts.add(piece)
            timing = run.watch.timing(stream.timing())
        return generate_pb2.GenerateResponse(
            model=run.model.info.name,
            completions=parts.completions,
            usage=run.usage(),
            timing=timing,
            prompt_logprobs=prompt,
        )

    async def GenerateStream(self, request: generate_pb2.GenerateRequest, outlet: Outlet) -> None:
        async with self._prepared(request, outlet.call) as (run, stream):
            feed = _feed(run, stream, optional(request, "chunk_tokens", 1))
            while not feed.is_done:
                await outlet.pour(feed)
                for part in await self._prompt_parts(run, feed.prompt):
                    await outlet.write(generate_pb2.GenerateChunk(prompt_logprobs=part))
                feed.prompt = None

    async def _prompt_parts(self, run: Run, found: PromptLogprobs | None) -> list[list[generate_pb2.TokenLogprob]]:
        if found is None:
            return []
        most = self._room.settings.max_message_bytes
        return await self._room.workers.run(found.ids.nbytes, prompt_messages, found, run.model, most)

    @contextlib.asynccontextmanager
    async def _prepared(
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext, is_unary: bool = False
    ) -> AsyncIterator[tuple[Run, TokenStream]]:
        """The request with its place in the queue and, tokenised, with its stream; both end with the block."""
        watch = Stopwatch()
        check_generate(request)
        model = self._room.registry.resolve(request.model, Capability.GENERATE)
        with self._room.admitted(context, model, Task.GENERATE, request.priority, _size(request)) as ticket:
            run = await self._prepare(request, model, watch)
            if is_unary and run.job.prompt_logprobs is not None:
                most = self._room.settings.max_message_bytes
                check_prompt_logprobs(len(run.job.prompt), run.job.prompt_logprobs, most)
            with run.stream(context, ticket) as stream:
                yield run, stream

    async def _prepare(self, request: generate_pb2.GenerateRequest, model: ServedModel, watch: Stopwatch) -> Run:
        sampling = read_sampling(request, model.generation_defaults, model.info.vocab_size)
        given = request.stop.token_ids
        stop_ids = frozenset(check_token_ids("stop.token_ids", given, model.info.vocab_size, MAX_STOP_TOKENS))
        prompt = await self._tokenize(model, request)
        watch.tokenized()
        stop = read_stop(request.stop, model, len(prompt), stop_ids)
        job = GenerateRequest(
            prompt=prompt,
            sampling=sampling,
            stop=stop,
            n=optional(request, "n", 1),
            priority=request.priority,
            request_id=current_id(),
            prompt_logprobs=sampling.logprobs if request.logprobs.prompt else None,
            constraint=await self._constraint(request, model),
        )
        if job.constraint is not None:
            watch.constrained()
        strings = tuple(request.stop.strings)
        rules = TextRules(strings, stop_ids, stop.min_new_tokens, request.stop.include_stop_in_text)
        return Run(model, job, rules, watch)

    async def _constraint(self, request: generate_pb2.GenerateRequest, model: ServedModel) -> Constraint | None:
        if not request.HasField("constraint"):
            return None
        kind = request.constraint.WhichOneof("kind") or ""
        given = request.constraint.choice.options if kind == "choice" else [getattr(request.constraint, kind)]
        text, eos_ids = ConstraintText(kind, tuple(given)), end_of_sequence_ids(model)
        return await self._room.constraints.compile(text, model.tokenizer, model.info.vocab_size, eos_ids)

    async def _tokenize(self, model: ServedModel, request: generate_pb2.GenerateRequest) -> list[int]:
        workers, limits = self._room.workers, self._room.input_limits
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidField("prompt", "is not set; allowed: one of text, token_ids, chat")
        if kind == "token_ids":
            given = request.token_ids.ids
            check = ("token_ids.ids", given, model.info.vocab_size, limits.max_text_bytes)
            ids = await workers.run(len(given), check_token_ids, *check)
        else:
            ids = await read_prompt(workers, model, request, limits)
        if not ids:
            raise InvalidField(kind, "has no tokens; allowed: at least one")
        return ids


def _size(request: generate_pb2.GenerateRequest) -> RequestSize:
    if request.HasField("chat"):
        return RequestSize(num_bytes=chat_bytes(request.chat))
    return RequestSize(text_bytes(request.text), len(request.token_ids.ids))


def read_stop(stop: generate_pb2.Stop, model: ServedModel, prompt_length: int, stop_ids: frozenset[int]) -> StopParams:
    """The engine's rules for an end. ``InvalidField`` when prompt and continuation do not fit the context."""
    longest = longest_sequence(model)
    if prompt_length >= longest:
        problem = f"has {prompt_length} tokens; allowed: at most {longest - 1}, so that one more fits the context"
        raise InvalidField("prompt", f"{problem} of {longest}")
    room = longest - prompt_length
    max_new = optional(stop, "max_new_tokens", room)
    if not 1 <= max_new <= room:
        problem = f"{max_new} is out of range; allowed: 1 to {room} behind a prompt of {prompt_length} tokens"
        raise InvalidField("stop.max_new_tokens", f"{problem} (context {longest})")
    min_new = optional(stop, "min_new_tokens", 0)
    check_count("stop.min_new_tokens", min_new, 0, max_new)
    ending = stop_ids | (frozenset() if stop.ignore_eos else end_of_sequence_ids(model))
    vocab_size = model.info.vocab_size
    if min_new and len(ending) >= vocab_size and ending.issuperset(range(vocab_size)):
        problem = "is above 0, but every token of the vocabulary ends a continuation: no token could come before"
        raise InvalidField("stop.min_new_tokens", problem)
    return StopParams(max_new_tokens=max_new, min_new_tokens=min_new, token_ids=ending)


def longest_sequence(model: ServedModel) -> int:
    """Most tokens of prompt and continuation: the context, or less where the cache holds less."""
    return min(model.info.context_length, model.info.kv_cache_tokens or model.info.context_length)


def end_of_sequence_ids(model: ServedModel) -> frozenset[int]:
    return model.generation_defaults.eos_token_ids or model.tokenizer.eos_token_ids


def _feed(run: Run, stream: TokenStream, chunk_tokens: int) -> ChunkFeed:
    continuations = Continuations(stream, run.model, run.job.n, run.rules)
    run.progress = continuations.progress

    def end(chunk: generate_pb2.GenerateChunk) -> None:
        chunk.usage.CopyFrom(run.usage())
        chunk.timing.CopyFrom(run.watch.timing(stream.timing()))

    return ChunkFeed(stream, continuations, Gatherer(chunk_tokens), end)


class _Parts:
    """The completions being put together. ``ResponseTooLarge`` as soon as they are sure to exceed ``most`` bytes."""

    def __init__(self, num: int, most: int) -> None:
        self.completions = [generate_pb2.Completion(index=index) for index in range(num)]
        self._most = most
        self._texts: list[list[str]] = [[] for _ in range(num)]
        self._least_bytes = 0

    def add(self, piece: Piece) -> None:
        completion, logprobs = self.completions[piece.index], [*map(token_logprob, piece.logprobs)]
        self._least_bytes += text_bytes(piece.text) + len(piece.token_ids) + sum(each.ByteSize() for each in logprobs)
        if self._least_bytes > self._most:
            problem = f"the response has more than {self._most} bytes (max_message_bytes)"
            raise ResponseTooLarge(f"{problem} before it is complete; use GenerateStream")
        self._texts[piece.index].append(piece.text)
        completion.token_ids.extend(piece.token_ids)
        completion.logprobs.extend(logprobs)
        if piece.finish is not None:
            completion.text = "".join(self._texts[piece.index])
            completion.finish_reason, completion.matched_stop = FINISH_PB[piece.finish], piece.matched_stop
