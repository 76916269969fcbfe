"""The load on a running server: each function measures one task over gRPC and returns its figures.

Every answer is checked for shape, so that a fast wrong answer is no figure. What is timed is the best of
``repeats`` runs after one warm-up. Prompts and prefixes begin with the run's number, so that nothing is
read from a prefix cache across runs; the peers do the same or have that cache switched off.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import grpc.aio
from workload import LABELS, NEW_TOKENS, SHORT_CALLS, SHORT_TEXT, UNITS, Workload, streams_of

from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    score_pb2,
    score_pb2_grpc,
)

ENCODER = "all-minilm-l6-v2"
DECODER = "gemma-3-270m"
RERANKER = "reranker"
REQUEST_SIZES = (32, 512)
WARM_CALLS = 20
_OPTIONS = [("grpc.max_receive_message_length", 64 * 2**20), ("grpc.max_send_message_length", 64 * 2**20)]
_run_numbers = count(1)

Figures = dict[str, float | int | str]


async def measure(address: str, work: Workload, repeats: int) -> list[Figures]:
    """All figures that the demo models give."""
    async with connect(address) as channel:
        figures = [await embed(channel, work, size, repeats) for size in REQUEST_SIZES]
        tasks = [task for task in UNITS if task not in ("embed", "rerank")]
        return figures + [await measure_task(channel, work, task, repeats) for task in tasks]


async def measure_task(channel: grpc.aio.Channel, work: Workload, task: str, repeats: int) -> Figures:
    """The figure of one task of ``workload.UNITS`` other than ``embed``, which has a size of requests to choose."""
    if task == "embed_one":
        return await short_text_latency(channel, SHORT_CALLS * repeats)
    if task in ("rerank", "score"):
        return await {"rerank": rerank, "score": score}[task](channel, work, repeats)
    return await generate(channel, work, streams_of(task), repeats)


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


async def best(
    run: Callable[[], Awaitable[Any]], repeats: int, check: Callable[[Any], None] | None = None
) -> tuple[float, Any]:
    """(seconds, result) of the fastest run after a warm-up. ``check`` is given each result, outside of its time."""
    await run()
    fastest: tuple[float, Any] = (math.inf, None)
    for _ in range(repeats):
        start = time.perf_counter()
        result = await run()
        seconds = time.perf_counter() - start
        if check is not None:
            check(result)
        if seconds < fastest[0]:
            fastest = seconds, result
    return fastest


def _inputs(texts: list[str]) -> list[common_pb2.Input]:
    return [common_pb2.Input(text=text) for text in texts]


async def embed(channel: grpc.aio.Channel, work: Workload, request_size: int, repeats: int) -> Figures:
    """Texts a second, all requests of ``request_size`` texts in flight at once."""
    stub = embed_pb2_grpc.EmbedServiceStub(channel)
    texts = work.embed_texts
    requests = [
        embed_pb2.EmbedRequest(
            model=ENCODER, inputs=_inputs(texts[start : start + request_size]), truncation=common_pb2.TRUNCATION_RIGHT
        )
        for start in range(0, len(texts), request_size)
    ]

    async def run() -> None:
        answers = await asyncio.gather(*(stub.Embed(request) for request in requests))
        vectors = [result.dense.values for answer in answers for result in answer.results]
        if len(vectors) != len(texts) or any(len(vector) != 384 for vector in vectors):
            raise RuntimeError("Embed did not answer every text with a vector")

    seconds, _ = await best(run, repeats)
    return {"task": "embed", "request_size": request_size, "texts_per_s": len(texts) / seconds}


async def short_text_latency(channel: grpc.aio.Channel, calls: int) -> Figures:
    """Median and 99th percentile of one short text at a time, in milliseconds."""
    stub = embed_pb2_grpc.EmbedServiceStub(channel)
    request = embed_pb2.EmbedRequest(model=ENCODER, inputs=_inputs([SHORT_TEXT]))
    milliseconds = []
    for _ in range(calls + WARM_CALLS):
        start = time.perf_counter()
        await stub.Embed(request)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    cuts = statistics.quantiles(milliseconds[WARM_CALLS:], n=100)
    return {"task": "embed_one", "p50_ms": cuts[49], "p99_ms": cuts[98]}


async def rerank(channel: grpc.aio.Channel, work: Workload, repeats: int) -> Figures:
    """Documents a second, all of them in one request."""
    stub = score_pb2_grpc.ScoreServiceStub(channel)
    request = score_pb2.RerankRequest(model=RERANKER, query=work.rerank_query, documents=work.rerank_documents)

    async def run() -> None:
        answer = await stub.Rerank(request)
        if sorted(result.index for result in answer.results) != list(range(len(work.rerank_documents))):
            raise RuntimeError("Rerank did not answer every document")

    seconds, _ = await best(run, repeats)
    return {"task": "rerank", "documents_per_s": len(work.rerank_documents) / seconds}


async def score(channel: grpc.aio.Channel, work: Workload, repeats: int) -> Figures:
    """Items a second behind one shared prefix, two labels over the whole vocabulary."""
    stub = score_pb2_grpc.ScoreServiceStub(channel)

    async def run() -> score_pb2.ScoreResponse:
        request = score_pb2.ScoreRequest(
            model=DECODER,
            query=common_pb2.Input(text=f"{next(_run_numbers)} {work.score_prefix}"),
            items=_inputs([f" {item}" for item in work.score_items]),
            labels=LABELS,
        )
        answer = await stub.Score(request)
        if [len(result.scores) for result in answer.results] != [len(LABELS)] * len(work.score_items):
            raise RuntimeError("Score did not answer every item with every label")
        return answer

    seconds, answer = await best(run, repeats)
    cached = int(answer.usage.cached_tokens)
    return {"task": "score", "items_per_s": len(work.score_items) / seconds, "cached_tokens": cached}


async def generate(channel: grpc.aio.Channel, work: Workload, streams: int, repeats: int) -> Figures:
    """New tokens a second over ``streams`` streams at once, and the median wait for a first token.

    Every message is read by itself, as it comes, and kept as bytes: the client shares the server's cores, so what it
    makes of them is done, and checked, when the clock has stopped.
    """
    # What the stub has, but for the messages' type.
    stream = channel.unary_stream(
        "/pyruntime.v1.GenerateService/GenerateStream",
        request_serializer=generate_pb2.GenerateRequest.SerializeToString,
        response_deserializer=None,
    )

    async def one(prompt: str, number: int) -> tuple[float, list[bytes]]:
        request = generate_pb2.GenerateRequest(
            model=DECODER,
            text=f"{number} {prompt}",
            sampling=generate_pb2.Sampling(temperature=0.0),
            stop=generate_pb2.Stop(max_new_tokens=NEW_TOKENS, ignore_eos=True),
        )
        start, first, chunks = time.perf_counter(), 0.0, list[bytes]()
        async for chunk in stream(request):
            first = first or time.perf_counter() - start
            chunks.append(chunk)
        return first, chunks

    async def run() -> list[tuple[float, list[bytes]]]:
        number = next(_run_numbers)
        return await asyncio.gather(*(one(prompt, number) for prompt in work.generate_prompts[:streams]))

    seconds, answers = await best(run, repeats, _check_streams)
    return {
        "task": "generate",
        "streams": streams,
        "tokens_per_s": streams * NEW_TOKENS / seconds,
        "first_token_p50_ms": statistics.median(first for first, _ in answers) * 1e3,
    }


def _check_streams(answers: list[tuple[float, list[bytes]]]) -> None:
    """Every stream had all of its tokens."""
    for _, chunks in answers:
        tokens = sum(len(generate_pb2.GenerateChunk.FromString(chunk).token_ids) for chunk in chunks)
        if tokens != NEW_TOKENS:
            raise RuntimeError(f"a stream ended after {tokens} of {NEW_TOKENS} tokens")
