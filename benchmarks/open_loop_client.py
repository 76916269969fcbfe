"""The open loop's requests and the client that sends them when they are due, whether or not others are answered."""

from __future__ import annotations

import asyncio
import gc
import random
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import grpc.aio
from arrivals import Seen, poisson
from load import DECODER, ENCODER, LABELS
from overhead_bench import RERANKER
from workload import make_workload

from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, score_pb2

WORK = make_workload()
WORDS = " ".join(WORK.embed_texts).split()
_numbers = count(1)


@dataclass(frozen=True)
class Task:
    """One kind of request. A call is in time when its first answer comes within ``objective_s``, and given up after
    ``deadline_s``; ``build`` draws a request and tells its size in ``unit``, ``done`` counts what an answer holds.
    """

    path: str
    model: str
    unit: str
    objective_s: float
    deadline_s: float
    build: Callable[[random.Random], tuple[Any, int]]
    answer: Any
    done: Callable[[Any], int]
    streams: bool = False


def _size(source: random.Random, most: int) -> int:
    """1 to ``most``, every doubling as likely as the next."""
    return round(most ** source.random())


def _input(text: str) -> common_pb2.Input:
    return common_pb2.Input(text=text)


def _embed(source: random.Random) -> tuple[Any, int]:
    texts = source.sample(WORK.embed_texts, _size(source, 32))
    request = embed_pb2.EmbedRequest(
        model=ENCODER, inputs=map(_input, texts), encoding=embed_pb2.ENCODING_FLOAT32_LE, truncation=_RIGHT
    )
    return request, len(texts)


def _rerank(source: random.Random) -> tuple[Any, int]:
    documents = source.sample(WORK.rerank_documents, _size(source, 32))
    request = score_pb2.RerankRequest(model=RERANKER, query=WORK.rerank_query, documents=documents, truncation=_RIGHT)
    return request, len(documents)


def _score(source: random.Random) -> tuple[Any, int]:
    """Items behind a query of 100 words that no other request has."""
    items = source.sample(WORK.score_items, _size(source, 16))
    query = f"{next(_numbers)} {' '.join(source.choices(WORDS, k=100))}"
    request = score_pb2.ScoreRequest(
        model=DECODER, query=_input(query), items=[_input(f" {item}") for item in items], labels=LABELS
    )
    return request, len(items)


def _generate(source: random.Random) -> tuple[Any, int]:
    """8 to 256 words, continued by 8 to 128 tokens that are drawn as chats draw them."""
    prompt = " ".join(source.choices(WORDS, k=8 * _size(source, 32)))
    new_tokens = 8 * _size(source, 16)
    number = next(_numbers)
    request = generate_pb2.GenerateRequest(
        model=DECODER,
        text=f"{number} {prompt}",
        sampling=generate_pb2.Sampling(temperature=0.8, top_p=0.95, seed=number),
        stop=generate_pb2.Stop(max_new_tokens=new_tokens, ignore_eos=True),
    )
    return request, new_tokens


_RIGHT = common_pb2.TRUNCATION_RIGHT
WIDTH_BYTES = 384 * 4
#: Longest average pause between the messages of a stream that is in time: about as fast as people read.
PAUSE_S = 0.15
TASKS = {
    "embed": Task(
        "EmbedService/Embed", ENCODER, "text", 0.5, 2.0, _embed, embed_pb2.EmbedResponse,
        lambda answer: sum(len(result.dense.packed) == WIDTH_BYTES for result in answer.results),
    ),
    "rerank": Task(
        "ScoreService/Rerank", RERANKER, "document", 1.0, 4.0, _rerank, score_pb2.RerankResponse,
        lambda answer: len(answer.results),
    ),
    "score": Task(
        "ScoreService/Score", DECODER, "item", 1.0, 4.0, _score, score_pb2.ScoreResponse,
        lambda answer: sum(len(result.scores) == len(LABELS) for result in answer.results),
    ),
    "generate": Task(
        "GenerateService/GenerateStream", DECODER, "token", 1.0, 12.0, _generate, generate_pb2.GenerateChunk,
        lambda chunk: len(chunk.token_ids), streams=True,
    ),
}  # fmt: skip


def planned(rates: dict[str, float], seconds: float, source: random.Random) -> list[Seen]:
    """The requests of a point in the order in which they are due, built before its clock starts."""
    calls = []
    for task, rate in rates.items():
        for at in poisson(rate, seconds, source):
            request, size = TASKS[task].build(source)
            calls.append(Seen(task, at, request.SerializeToString(), size))
    return sorted(calls, key=lambda call: call.at)


class Client:
    """Sends bytes that are ready, and reads of the answers what is counted: it shares the machine with the server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._calls = {
            name: (channel.unary_stream if task.streams else channel.unary_unary)(
                f"/pyruntime.v1.{task.path}", response_deserializer=task.answer.FromString
            )
            for name, task in TASKS.items()
        }

    async def drive(self, calls: Sequence[Seen], deadline_s: float | None = None) -> None:
        """Returns when all calls, each sent when it is due, have ended. ``deadline_s``: in place of their tasks' own.

        Raises ``RuntimeError`` for an answer that lacks a part.
        """
        gc.disable()
        try:
            start, running = time.perf_counter(), []
            for call in calls:
                await asyncio.sleep(max(0.0, start + call.at - time.perf_counter()))
                running.append(asyncio.ensure_future(self._one(call, start, deadline_s or TASKS[call.task].deadline_s)))
            await asyncio.gather(*running)
        finally:
            gc.enable()
        if wrong := [call for call in calls if call.code == "OK" and call.done != call.size]:
            raise RuntimeError(f"{wrong[0].task}: {wrong[0].done} answers of {wrong[0].size}")

    async def _one(self, call: Seen, start: float, deadline_s: float) -> None:
        """Sends a call now and notes what becomes of it; ``start`` is the clock at the point's start."""
        task, method = TASKS[call.task], self._calls[call.task]
        call.sent = time.perf_counter() - start
        try:
            if task.streams:
                await self._read(method(call.body, timeout=deadline_s), call, task, start)
            else:
                answer = await method(call.body, timeout=deadline_s)
                call.first = call.end = time.perf_counter() - start
                call.done, usage = task.done(answer), answer.usage
                call.computed = usage.prompt_tokens - usage.cached_tokens
            call.code = "OK"
        except grpc.aio.AioRpcError as error:
            call.end = time.perf_counter() - start
            call.code = error.code().name

    @staticmethod
    async def _read(stream: Any, call: Seen, task: Task, start: float) -> None:
        last = 0.0
        async for chunk in stream:
            now = time.perf_counter() - start
            if not chunk.token_ids:
                continue
            if last:
                call.gaps.append(now - last)
            else:
                call.first = now
            last = call.end = now
            call.done += task.done(chunk)
            if chunk.HasField("usage"):
                call.computed = chunk.usage.prompt_tokens - chunk.usage.cached_tokens


def event_loop() -> asyncio.AbstractEventLoop:
    """One that sleeps to the microsecond: what asyncio takes otherwise rounds up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
