"""Decode steps captured as graphs against the same kernel by kernel: rows, launches and time of a step.

    python tools/gpu_graphs.py [--device cuda] [--model FOLDER]…

Without folders: a decoder of the shape of Gemma 3 270M with random weights. First a line of what the capture took,
then one for each number of streams: whether the captured rows are those of the same padded step bit for bit, their
least cosine with the step as it runs without padding, calls of the CUDA runtime that launch or copy, and microseconds
of a whole step (plan, batch, forward, logits, the host's reading of the next tokens), eager and captured. The last line
is JSON; rows that differ are an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Arguments
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pyruntime.model.graphs import CapturedSteps, CudaRecorder, NotCapturable, Recorder
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel, load_model
from pyruntime.model.probe import LEAST_COSINE
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import ForwardBatch, Task
from tools.gpu_runner import BLOCK, save_random

STREAMS = (1, 3, 8, 33, 64)
LONGEST = 1100  # of a prompt, so that one stream needs the wider tables
STEPS, TIMED = 4, 20
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


class Again:
    """In the place of graphs where there is no GPU."""

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        answer = call().clone()

        def replay() -> None:
            answer.copy_(call())

        return replay, answer


class Streams:
    """So many sequences that decode, greedily, each with a prompt of its own length."""

    def __init__(self, loaded: LoadedModel, count: int) -> None:
        room = loaded.max_positions - STEPS - 2 * TIMED - 8
        lengths = [min(room, LONGEST if place == 0 else 20 + 3 * place) for place in range(count)]
        self._scheduler = Scheduler(BlockPool(blocks_for(loaded), BLOCK), 2048, count)
        for length in lengths:
            tokens = [3 + (7 * place + length) % (loaded.vocab_size - 3) for place in range(length)]
            self._scheduler.add([Sequence(Task.GENERATE, tokens)])

    def plan(self) -> StepPlan:
        return self._scheduler.schedule()

    def go_on(self, plan: StepPlan, batch: ForwardBatch, tokens: list[int]) -> None:
        """``tokens``: of each packed row the next one."""
        self._scheduler.advance(plan)
        for span in batch.rows:
            if span.reads:
                span.sequence.token_ids.append(tokens[span.last])


class Device:
    """A model with its steps captured, to be run either way."""

    def __init__(self, loaded: LoadedModel, recorder: Recorder) -> None:
        self.loaded = loaded
        num_blocks = blocks_for(loaded)
        shapes = StepShapes(max(STREAMS), loaded.max_positions, num_blocks, BLOCK)
        cache = KVCache(loaded.cache_shapes, num_blocks, BLOCK, loaded.dtype, loaded.device, has_spare=True)
        self.runner = ModelRunner(loaded, cache)
        self.padding = BatchBuilder(BLOCK, loaded.device, loaded.takes_token_types, shapes)
        self.plain = BatchBuilder(BLOCK, loaded.device, loaded.takes_token_types)
        self._wait()
        begin, before = time.perf_counter(), self._memory()
        batches = ((self.padding.padding(shape), self.padding.rehearsed(shape)) for shape in shapes.all())
        self.runner.captured = CapturedSteps(self.runner.compute, batches, recorder, LEAST_COSINE[loaded.dtype])
        self._wait()
        self.figures: dict[str, object] = {
            "graphs": len(self.runner.captured),
            "capture_s": round(time.perf_counter() - begin, 2),
            "graphs_mib": round((self._memory() - before) / 2**20, 1),
        }

    def tokens(self, hidden: torch.Tensor) -> list[int]:
        assert self.loaded.output_head is not None
        return self.loaded.output_head.logits(hidden).argmax(-1).tolist()

    def streams(self, count: int) -> Streams:
        """Behind their prompts."""
        streams = Streams(self.loaded, count)
        while True:
            plan = streams.plan()
            batch = self.plain.build(plan)
            streams.go_on(plan, batch, self.tokens(self.runner.forward(batch)))
            if len(plan.entries) == count and all(sequence.is_decoding for sequence, _ in plan.entries):
                return streams

    def compare(self, streams: Streams) -> dict[str, object]:
        is_equal, least = True, 1.0
        for _ in range(STEPS):
            plan = streams.plan()
            padded, batch = self.padding.build(plan), self.plain.build(plan)
            assert padded.shape is not None
            rows = self.runner.forward(padded)[: batch.num_tokens].clone()
            is_equal = is_equal and torch.equal(rows, self.runner.compute(padded)[: batch.num_tokens])
            wanted = self.runner.compute(batch).double()
            least = min(least, torch.nn.functional.cosine_similarity(rows.double(), wanted, dim=-1).min().item())
            streams.go_on(plan, batch, self.tokens(rows))
        return {"bit_equal": is_equal, "least_cosine": round(least, 6)}

    def step(self, streams: Streams, builder: BatchBuilder) -> None:
        plan = streams.plan()
        batch = builder.build(plan)
        hidden = self.runner.forward(batch)[: plan.num_tokens]
        streams.go_on(plan, batch, self.tokens(hidden))

    def microseconds(self, streams: Streams, builder: BatchBuilder) -> float:
        """Median of whole steps, each of which ends with its tokens on the host."""
        times = []
        for _ in range(TIMED):
            begin = time.perf_counter()
            self.step(streams, builder)
            times.append(time.perf_counter() - begin)
        return round(1e6 * statistics.median(times), 1)

    def launches(self, streams: Streams, builder: BatchBuilder) -> int:
        """Calls of the CUDA runtime in one step; 0 on a CPU."""
        if self.loaded.device == "cpu":
            self.step(streams, builder)
            return 0
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.step(streams, builder)
            self._wait()
        return sum(event.name.startswith(LAUNCHES) for event in profiler.events())

    def _wait(self) -> None:
        if self.loaded.device != "cpu":
            torch.cuda.synchronize()

    def _memory(self) -> int:
        return torch.cuda.memory_reserved() if self.loaded.device != "cpu" else 0


def blocks_for(loaded: LoadedModel) -> int:
    """Blocks that hold the largest number of streams to their ends."""
    return min(loaded.max_positions, LONGEST) // BLOCK + max(STREAMS) * 20


@torch.inference_mode()
def measure(folder: Path, dtype: str, device: str) -> list[dict[str, object]]:
    """What the capture took, then for each number of streams how steps compare. Raises SystemExit where they differ."""
    loaded = load_model(folder, dtype, device)
    name = f"{folder.name}, {dtype}"
    try:
        on = Device(loaded, Again() if device == "cpu" else CudaRecorder(device))
    except NotCapturable as error:  # it is served without
        return [{"name": name, "not_captured": str(error)}]
    figures: list[dict[str, object]] = [{"name": name, **on.figures}]
    for count in STREAMS:
        streams = on.streams(count)
        found: dict[str, object] = {"name": name, "streams": count, **on.compare(streams)}
        for way, builder in (("eager", on.plain), ("captured", on.padding)):
            found[f"launches_{way}"] = on.launches(streams, builder)
            found[f"us_{way}"] = on.microseconds(streams, builder)
        figures.append(found)
        if not float(str(found["least_cosine"])) >= LEAST_COSINE[loaded.dtype]:
            raise SystemExit(f"captured rows differ from those of the same step run eagerly: {found}")
    return figures


def main(arguments: Arguments[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compares captured decode steps with eager ones.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, action="append", metavar="FOLDER", help="instead of the random one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.model or [save_random(Path(scratch), "gemma3_text")]
        figures = [line for folder in folders for line in measure(folder, "bfloat16", options.device)]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
