"""Measures what guessing tokens ahead from the text so far gains where a text repeats, and costs where none does.

``python benchmarks/lookup_bench.py``; needs an otherwise idle machine. Starts two servers, one that guesses and one
that does not, and sends both the same requests in turns, so that both see the machine's ups and downs. Prints a line
for each task and number of streams, and writes them to benchmarks/results/lookup.json:

- ``copy``: greedy, behind a text that came twice and began a third time;
- ``free``: drawn at temperature 1 with fixed seeds, which hardly repeats anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc.aio  # noqa: E402
from server_process import running_server  # noqa: E402
from workload import make_workload  # noqa: E402

from pyruntime.v1 import generate_pb2, generate_pb2_grpc  # noqa: E402

MODES = ("auto", "off")
TASKS = ("copy", "free")
MODEL = "gemma-3-270m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--streams", default="1,4,16", help="how many at once [1,4,16]")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each server [7]")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens of each stream [192]")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "lookup.json")
    parser.add_argument("server_options", nargs="*", help="behind --: options of both servers, as --max-draft-tokens 4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        addresses = {}
        for mode in MODES:
            server = running_server(
                options.dtype, Path(scratch) / f"{mode}.log", "--speculation", mode, *options.server_options
            )
            addresses[mode] = stack.enter_context(server)
        figures = asyncio.run(_measure(addresses, options))
    options.output.write_text(json.dumps({"dtype": options.dtype, "figures": figures}, indent=1) + "\n")


def _show(figure: dict[str, Any]) -> None:
    print(
        f"{figure['task']}, {figure['streams']} streams: {figure['auto']:.1f} tokens/s, else {figure['off']:.1f}: "
        f"{figure['ratio']:.2f} times, from {figure['least_ratio']:.2f} to {figure['most_ratio']:.2f}; "
        f"{figure['same']:.0%} of the streams the same",
        flush=True,
    )


async def _measure(addresses: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    figures = []
    async with grpc.aio.insecure_channel(addresses["auto"]) as auto, grpc.aio.insecure_channel(addresses["off"]) as off:
        stubs = {"auto": generate_pb2_grpc.GenerateServiceStub(auto), "off": generate_pb2_grpc.GenerateServiceStub(off)}
        for task in TASKS:
            for streams in (int(number) for number in options.streams.split(",")):
                requests = list(_requests(task, streams, options.tokens))
                figures.append({"task": task, "streams": streams} | await _compare(stubs, requests, options.rounds))
                _show(figures[-1])
    return figures


async def _compare(
    stubs: dict[str, generate_pb2_grpc.GenerateServiceStub], requests: list[generate_pb2.GenerateRequest], rounds: int
) -> dict[str, Any]:
    """Medians over the rounds, of which the first does not count; ratios are of turns beside each other."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for mode in MODES if turn % 2 else reversed(MODES):
            rate, texts[mode] = await _run(stubs[mode], requests)
            if turn:
                rates[mode].append(rate)
    ratios = [ours / theirs for ours, theirs in zip(rates["auto"], rates["off"], strict=True)]
    same = sum(ours == theirs for ours, theirs in zip(texts["auto"], texts["off"], strict=True)) / len(requests)
    medians = {mode: statistics.median(values) for mode, values in rates.items()}
    spread = {"ratio": statistics.median(ratios), "least_ratio": min(ratios), "most_ratio": max(ratios)}
    return medians | spread | {"same": same, "rates": rates}


async def _run(
    stub: generate_pb2_grpc.GenerateServiceStub, requests: list[generate_pb2.GenerateRequest]
) -> tuple[float, list[list[int]]]:
    """(tokens a second of all streams together, prompts included; the tokens of each)."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(_stream(stub, request) for request in requests))
    return sum(map(len, answers)) / (time.perf_counter() - began), answers


async def _stream(stub: generate_pb2_grpc.GenerateServiceStub, request: generate_pb2.GenerateRequest) -> list[int]:
    return [token async for chunk in stub.GenerateStream(request) for token in chunk.token_ids]


def _requests(task: str, streams: int, tokens: int) -> Iterator[generate_pb2.GenerateRequest]:
    work = make_workload()
    for number in range(streams):
        if task == "copy":
            # Long enough that the third time lasts as long as the answer does.
            text = " ".join(work.rerank_documents[4 * number : 4 * number + 4])
            prompt, sampling = f"{text}\n\n{text}\n\n{text[:80]}", generate_pb2.Sampling(temperature=0.0)
        else:
            prompt, sampling = work.generate_prompts[number], generate_pb2.Sampling(temperature=1.0, seed=number)
        stop = generate_pb2.Stop(max_new_tokens=tokens, ignore_eos=True)
        yield generate_pb2.GenerateRequest(model=MODEL, text=prompt, sampling=sampling, stop=stop)


if __name__ == "__main__":
    main()
