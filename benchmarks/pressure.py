"""How the server behaves under mixed and too much load: the scenarios that throughput alone does not show.

mixed      streams, and bursts of embeddings and scores on the same model: what the streams feel, what is lost in all
prefix     a repeated system prompt: time to first token when it has been seen before
overload   four times more requests than can be served, each with a deadline: what is still answered in time

Every scenario takes a channel and returns figures; ``pressure_bench.py`` starts the server and prints them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable
from itertools import count
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from load import DECODER, ENCODER, LABELS
from workload import Workload

from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)

Figures = dict[str, float | int | str]
STREAMS = 16
BURST_EMBEDS = 100
BURST_ITEMS = 200
# Streams run this long before a burst begins.
WARM_S = 1.5
_run_numbers = count(10_000)


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def _texts(texts: list[str], number: int) -> list[common_pb2.Input]:
    return [common_pb2.Input(text=f"{number} {text}") for text in texts]


class Arrival(NamedTuple):
    """When so many tokens of a stream came, and how long after those before them (0 for the first)."""

    at: float
    num_tokens: int
    gap_s: float


class Decoder:
    """The three tasks on one decoder. Each method returns the tokens that the server computed for it."""

    def __init__(self, channel: grpc.aio.Channel, work: Workload) -> None:
        self._work = work
        self._generate = generate_pb2_grpc.GenerateServiceStub(channel)
        self._embed = embed_pb2_grpc.EmbedServiceStub(channel)
        self._score = score_pb2_grpc.ScoreServiceStub(channel)

    async def stream(self, index: int, new_tokens: int, arrivals: list[Arrival]) -> int:
        """One greedy stream; each of its tokens is noted in ``arrivals``."""
        request = generate_pb2.GenerateRequest(
            model=DECODER,
            text=f"{next(_run_numbers)} {self._work.generate_prompts[index]}",
            sampling=generate_pb2.Sampling(temperature=0.0),
            stop=generate_pb2.Stop(max_new_tokens=new_tokens, ignore_eos=True),
        )
        last, tokens = 0.0, 0
        async for chunk in self._generate.GenerateStream(request):
            now = time.perf_counter()
            arrivals.append(Arrival(now, len(chunk.token_ids), now - last if last else 0.0))
            last, tokens = now, tokens + len(chunk.token_ids)
        return tokens + int(chunk.usage.prompt_tokens)

    async def embed(self) -> int:
        request = embed_pb2.EmbedRequest(
            model=DECODER,
            inputs=_texts(self._work.embed_texts[:BURST_EMBEDS], next(_run_numbers)),
            encoding=embed_pb2.ENCODING_FLOAT32_LE,
        )
        usage = (await self._embed.Embed(request)).usage
        return int(usage.prompt_tokens - usage.cached_tokens)

    async def score(self) -> int:
        items = [f" {item}" for item in self._work.score_items]
        request = score_pb2.ScoreRequest(
            model=DECODER,
            query=common_pb2.Input(text=f"{next(_run_numbers)} {self._work.score_prefix}"),
            items=[common_pb2.Input(text=items[i % len(items)] + str(i)) for i in range(BURST_ITEMS)],
            labels=LABELS,
        )
        usage = (await self._score.Score(request)).usage
        return int(usage.prompt_tokens - usage.cached_tokens)

    async def streams(self, new_tokens: int, arrivals: list[Arrival]) -> int:
        return sum(await asyncio.gather(*(self.stream(i, new_tokens, arrivals) for i in range(STREAMS))))


async def _rate(work: Awaitable[int]) -> float:
    start = time.perf_counter()
    tokens = await work
    return tokens / (time.perf_counter() - start)


async def mixed(channel: grpc.aio.Channel, work: Workload, new_tokens: int = 700) -> Figures:
    """Each task alone, then a burst of embeddings and scores while streams run, of whose time alone the figures are."""
    decoder = Decoder(channel, work)
    await asyncio.gather(decoder.embed(), decoder.score(), decoder.streams(8, []))  # warm-up
    alone: list[Arrival] = []
    together: list[Arrival] = []
    generate = await _rate(decoder.streams(100, alone))
    embed = await _rate(decoder.embed())
    score = await _rate(decoder.score())
    streams = asyncio.ensure_future(decoder.streams(new_tokens, together))
    await asyncio.sleep(WARM_S)
    start = time.perf_counter()
    burst = sum(await asyncio.gather(decoder.embed(), decoder.score()))
    end = time.perf_counter()
    if streams.done():
        raise RuntimeError("the streams ended before the burst did")
    streams.cancel()
    during = [each for each in together if start <= each.at <= end]
    gaps = [each.gap_s * 1e3 for each in during]
    usual = [each.gap_s * 1e3 for each in alone if each.gap_s]
    return {
        "task": "mixed",
        "generate_alone_tokens_per_s": generate,
        "embed_alone_tokens_per_s": embed,
        "score_alone_tokens_per_s": score,
        "together_tokens_per_s": (burst + sum(each.num_tokens for each in during)) / (end - start),
        "burst_s": end - start,
        "gap_p50_alone_ms": statistics.median(usual),
        "gap_p99_alone_ms": _percentile(usual, 99),
        "gap_p50_together_ms": statistics.median(gaps),
        "gap_p99_together_ms": _percentile(gaps, 99),
        "gap_longest_together_ms": max(gaps),
    }


async def prefix(channel: grpc.aio.Channel, work: Workload, repeats: int = 5) -> Figures:
    """Milliseconds to the first token behind a system prompt of 1,000 tokens, new and seen before."""
    stub = generate_pb2_grpc.GenerateServiceStub(channel)
    source = random.Random(1)
    words = " ".join(work.embed_texts).split()

    async def first_token_ms(system: str, question: str) -> float:
        request = generate_pb2.GenerateRequest(
            model=DECODER, text=system + question, stop=generate_pb2.Stop(max_new_tokens=2, ignore_eos=True)
        )
        start = time.perf_counter()
        seconds = 0.0
        async for _ in stub.GenerateStream(request):
            seconds = seconds or time.perf_counter() - start
        return seconds * 1e3

    new, seen = [], []
    for run in range(repeats):
        system = f"{next(_run_numbers)} " + " ".join(source.choice(words) for _ in range(900))
        new.append(await first_token_ms(system, f" What is {run}?"))
        seen += [await first_token_ms(system, f" And what of {i}?") for i in range(3)]
    return {
        "task": "prefix",
        "first_token_new_ms": statistics.median(new),
        "first_token_seen_ms": statistics.median(seen),
    }


class Outcomes:
    """What became of the requests of one stretch of load."""

    def __init__(self) -> None:
        self.in_time = 0
        self.late: list[float] = []
        self.refused: list[float] = []
        self.refused_without_retry_info = 0

    async def one(self, call: Any, request: bytes, deadline_s: float) -> None:
        start = time.perf_counter()
        try:
            await call(request, timeout=deadline_s)
            self.in_time += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.refused.append(time.perf_counter() - start)
                self.refused_without_retry_info += not _has_retry_info(error)
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.late.append(time.perf_counter() - start)
            else:
                raise


def _has_retry_info(error: grpc.aio.AioRpcError) -> bool:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            details = status_pb2.Status.FromString(value).details
            return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
    return False


async def overload(
    channel: grpc.aio.Channel, work: Workload, seconds: float = 15.0, deadline_s: float = 2.0, size: int = 16
) -> Figures:
    """Requests of ``size`` texts: the peak with a few in flight, then Poisson arrivals at four times that rate."""
    # Bytes in and out: the client shares the server's cores, and what it costs is not what is measured.
    call = channel.unary_unary("/pyruntime.v1.EmbedService/Embed")
    texts = [text for text in work.embed_texts if len(text.split()) < 120]
    source = random.Random(2)

    def request() -> bytes:
        inputs = [common_pb2.Input(text=source.choice(texts)) for _ in range(size)]
        message = embed_pb2.EmbedRequest(model=ENCODER, inputs=inputs, encoding=embed_pb2.ENCODING_FLOAT32_LE)
        return message.SerializeToString()

    requests = [request() for _ in range(256)]

    async def closed_loop(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await call(source.choice(requests))
            done += 1
        return done

    await call(requests[0])
    start = time.perf_counter()
    done = sum(await asyncio.gather(*(closed_loop(start + seconds / 2) for _ in range(8))))
    peak = done / (time.perf_counter() - start)
    outcomes, tasks = Outcomes(), []
    client_cpu_s = time.process_time()
    start, due = time.perf_counter(), 0.0
    while due < seconds:
        due += source.expovariate(4 * peak)
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(outcomes.one(call, source.choice(requests), deadline_s)))
    await asyncio.gather(*tasks)
    elapsed = time.perf_counter() - start
    return {
        "task": f"overload, deadlines of {deadline_s:g} s",
        "peak_requests_per_s": peak,
        "goodput_requests_per_s": outcomes.in_time / elapsed,
        "client_cpu_share_of_a_core": (time.process_time() - client_cpu_s) / elapsed,
        "offered": len(tasks),
        "in_time": outcomes.in_time,
        "refused_for_their_deadline": sum(seconds < deadline_s / 2 for seconds in outcomes.late),
        "late": sum(seconds >= deadline_s / 2 for seconds in outcomes.late),
        "refused": len(outcomes.refused),
        "refused_without_retry_info": outcomes.refused_without_retry_info,
        "refusal_p50_ms": statistics.median(outcomes.refused) * 1e3 if outcomes.refused else 0.0,
    }


async def queue_full(channel: grpc.aio.Channel, work: Workload) -> Figures:
    """As ``overload``, with deadlines that nobody misses: the bounds of the queue refuse what is too much."""
    return await overload(channel, work, seconds=12.0, deadline_s=60.0)
