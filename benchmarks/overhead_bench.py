"""What gRPC costs: the service against its own engine called in process, idle streams, one short text, protobuf.

Prints a table with what is asked of each figure, and writes benchmarks/results/overhead.json. Run it on an otherwise
idle machine. Service and engine are two processes that take turns, round by round; medians count. The client runs on
the same cores as the server, so what it does is in the service's figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc.aio  # noqa: E402
import psutil  # noqa: E402
from bench_models import make_reranker  # noqa: E402
from load import ENCODER, RERANKER, _inputs  # noqa: E402
from server_process import running_server  # noqa: E402
from workload import make_workload  # noqa: E402

from pyruntime.v1 import common_pb2, embed_pb2, embed_pb2_grpc, score_pb2, score_pb2_grpc  # noqa: E402

SIZES = (32, 512)
NUM_IDLE, NUM_CONNECTIONS, NUM_DOCUMENTS = 1000, 4, 100
QUERY = "how long does a request wait in the queue"
_OPTIONS = [("grpc.max_receive_message_length", 64 * 2**20), ("grpc.use_local_subchannel_pool", 1)]

Figure = dict[str, Any]


def main() -> None:
    options = _options()
    if options.engine:
        asyncio.run(serve_engine(options))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        reranker = f"{RERANKER}={make_reranker(Path(scratch))}"
        log = Path(scratch) / "server.log"
        with running_server(options.dtype, log, "--model", reranker) as address:
            figures = asyncio.run(measure(address, options))
    (options.output / "overhead.json").write_text(json.dumps({"dtype": options.dtype, "figures": figures}, indent=1))
    for figure in figures:
        verdict = "met" if figure["met"] else "MISSED"
        print(f"{figure['figure']:<48} {figure['value']:>9.3f}  asked {figure['asked']:<8} {verdict}  {figure['of']}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="alternating runs of service and engine [7]")
    parser.add_argument("--calls", type=int, default=300, help="of one short text [300]")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)  # the second process
    return parser.parse_args()


async def measure(address: str, options: argparse.Namespace) -> list[Figure]:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        return [
            *await against_engine(channel, options),
            await short_text(channel, options.calls),
            await rerank_protobuf(channel),
            await idle_streams(address),
        ]


def _figure(name: str, value: float, asked: float, met: bool, of: str) -> Figure:
    return {"figure": name, "value": value, "asked": f"{'>=' if asked == 0.95 else '<='} {asked}", "met": met, "of": of}


# -- the same texts through the service and through its engine ------------------------------------------------------


async def against_engine(channel: grpc.aio.Channel, options: argparse.Namespace) -> list[Figure]:
    command = [sys.executable, str(Path(__file__)), "--engine", "--dtype", options.dtype]
    engine = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert engine.stdin is not None and engine.stdout is not None
    figures = []
    try:
        for size in SIZES:
            ours, theirs = list[float](), list[float]()
            for number in range(options.rounds + 1):
                if number == 1:  # the first is a warm-up
                    ours, theirs, cpu = [], [], (_cpu_s(_server()), _cpu_s(psutil.Process(engine.pid)))
                ours.append(await embed_all(channel, size))
                engine.stdin.write(f"{size}\n".encode())
                theirs.append(float(await engine.stdout.readline()))
            service_s, engine_s = statistics.median(ours), statistics.median(theirs)
            ratio, texts = engine_s / service_s, len(make_workload().embed_texts)
            used = _cpu_s(_server()) - cpu[0], _cpu_s(psutil.Process(engine.pid)) - cpu[1]
            each = [f"{1e3 * seconds / texts / options.rounds:.2f}" for seconds in used]
            of = f"{texts / service_s:.0f} and {texts / engine_s:.0f} texts/s, {' and '.join(each)} ms of CPU a text"
            figures.append(_figure(f"embed, {size} a request: service / engine", ratio, 0.95, ratio >= 0.95, of))
    finally:
        engine.kill()
        await engine.wait()
    return figures


async def embed_all(channel: grpc.aio.Channel, size: int) -> float:
    """Seconds for all texts, every request in flight at once."""
    stub, texts = embed_pb2_grpc.EmbedServiceStub(channel), make_workload().embed_texts
    start = time.perf_counter()
    requests = [
        embed_pb2.EmbedRequest(
            model=ENCODER, inputs=_inputs(texts[first : first + size]), truncation=common_pb2.TRUNCATION_RIGHT
        )
        for first in range(0, len(texts), size)
    ]
    answers = await asyncio.gather(*(stub.Embed(request) for request in requests))
    seconds = time.perf_counter() - start
    if sum(len(result.dense.values) == 384 for answer in answers for result in answer.results) != len(texts):
        raise RuntimeError("Embed did not answer every text with a vector")
    return seconds


async def serve_engine(options: argparse.Namespace) -> None:
    """The engine in this process: for each number on standard input, seconds for all texts in requests of that size."""
    from pyruntime.config import Settings
    from pyruntime.model.demo import minilm_folder
    from pyruntime.registry import ServedModel
    from pyruntime.serving import load_served_model
    from pyruntime.types import EmbedRequest

    # On a thread that ends, as the server loads: a second OpenMP team in the process changes how the first one waits.
    loaded = list[ServedModel]()
    settings = Settings(dtype=options.dtype)

    def load() -> None:
        loaded.append(load_served_model(ENCODER, str(minilm_folder()), settings, lambda line: None))

    loader = threading.Thread(target=load)
    loader.start()
    await asyncio.to_thread(loader.join)
    model = loaded[0]
    info, texts = model.info, make_workload().embed_texts

    def encode(part: list[str]) -> list[list[int]]:
        ids = model.tokenizer.encode_batch(part)
        return [model.tokenizer.truncate(each, info.context_length, "head") for each in ids]

    async def answer(part: list[str]) -> int:
        ids = await asyncio.to_thread(encode, part)
        request = EmbedRequest(ids, info.default_pooling, info.normalize_default, info.embedding_dimensions)
        return len((await model.engine.embed(request))[0])

    while line := await asyncio.to_thread(sys.stdin.readline):
        size = int(line)
        start = time.perf_counter()
        parts = [texts[first : first + size] for first in range(0, len(texts), size)]
        if sum(await asyncio.gather(*(answer(part) for part in parts))) != len(texts):
            raise RuntimeError("the engine did not answer every text")
        print(time.perf_counter() - start, flush=True)
    model.engine.close()


# -- one short text, protobuf, idle streams -------------------------------------------------------------------------


async def short_text(channel: grpc.aio.Channel, calls: int) -> Figure:
    """Latency that a client sees beyond the forward, whose time the answer tells."""
    stub = embed_pb2_grpc.EmbedServiceStub(channel)
    request = embed_pb2.EmbedRequest(model=ENCODER, inputs=_inputs([QUERY]))
    whole, forward = list[float](), list[float]()
    for number in range(calls + 20):
        start = time.perf_counter()
        answer = await stub.Embed(request)
        if number >= 20:
            whole.append((time.perf_counter() - start) * 1e3)
            forward.append(answer.timing.compute.ToNanoseconds() / 1e6)
    over = statistics.median(whole) - statistics.median(forward)
    of = f"{statistics.median(whole):.2f} ms of which {statistics.median(forward):.2f} ms forward"
    return _figure("embed, one short text: ms beyond the forward", over, 1.5, over <= 1.5, of)


async def rerank_protobuf(channel: grpc.aio.Channel) -> Figure:
    """What protobuf takes on both sides, messages built and read in Python included, as part of the call."""
    stub = score_pb2_grpc.ScoreServiceStub(channel)
    documents = make_workload().embed_texts[:NUM_DOCUMENTS]

    def build() -> score_pb2.RerankRequest:
        right = common_pb2.TRUNCATION_RIGHT
        return score_pb2.RerankRequest(model=RERANKER, query=QUERY, documents=documents, truncation=right)

    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        answer = await stub.Rerank(build())
        seconds.append(time.perf_counter() - start)
    if len(answer.results) != NUM_DOCUMENTS:
        raise RuntimeError("Rerank did not answer every document")
    request, response = build().SerializeToString(), answer.SerializeToString()

    def build_answer() -> None:
        made = score_pb2.RerankResponse(model=RERANKER)
        for each in answer.results:
            made.results.add(index=each.index, score=each.score)
        made.SerializeToString()

    handling: list[Callable[[], object]] = [
        lambda: build().SerializeToString(),
        lambda: list(score_pb2.RerankRequest.FromString(request).documents),
        build_answer,
        lambda: [(each.index, each.score) for each in score_pb2.RerankResponse.FromString(response).results],
    ]
    protobuf_s, whole_s = sum(map(_seconds_of, handling)), statistics.median(seconds[1:])
    share = 100 * protobuf_s / whole_s
    of = f"{protobuf_s * 1e3:.2f} ms of {whole_s * 1e3:.0f} ms"
    return _figure("rerank, 100 documents: % in protobuf", share, 2, share <= 2, of)


def _seconds_of(work: Callable[[], object], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def idle_streams(address: str) -> Figure:
    """Memory of the server for streams that have been used once and wait for more.

    Two thousand are opened, and the thousand that grew it more counts: the first may fit into memory that was free.
    """
    request = embed_pb2.EmbedRequest(model=ENCODER, inputs=_inputs([QUERY]))
    channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(2 * NUM_CONNECTIONS)]
    stubs = [embed_pb2_grpc.EmbedServiceStub(each) for each in channels]

    async def use(stub: embed_pb2_grpc.EmbedServiceStub) -> Any:
        call = stub.EmbedStream()
        await call.write(request)
        if not (await call.read()).results:
            raise RuntimeError("EmbedStream did not answer")
        return call

    # What the first streams cost once is no stream's cost.
    for call in [await use(stub) for stub in stubs for _ in range(5)]:
        await call.done_writing()
        await call.read()
    calls, levels = list[Any](), [_server_bytes()]
    for half in (stubs[:NUM_CONNECTIONS], stubs[NUM_CONNECTIONS:]):
        for _ in range(NUM_IDLE // 50):
            calls += await asyncio.gather(*(use(half[number % NUM_CONNECTIONS]) for number in range(50)))
        levels.append(_server_bytes())
    for call in calls:
        call.cancel()
    for each in channels:
        await each.close()
    grown = max(levels[1] - levels[0], levels[2] - levels[1]) / 1e6
    of = f"{grown * 1e3 / NUM_IDLE:.1f} kB a stream, {NUM_CONNECTIONS} connections"
    return _figure(f"{NUM_IDLE} idle streams: MB", grown, 50, grown <= 50, of)


def _server() -> psutil.Process:
    return next(each for each in psutil.Process().children() if "server.py" in each.cmdline())


def _server_bytes() -> int:
    return int(_server().memory_info().rss)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
