"""Captured decode steps, on a CPU: a tape in the place of the graph finds what a graph would get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyruntime.model.graphs import CapturedSteps
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel, load_model
from pyruntime.model.runner import ModelRunner
from pyruntime.model.weights import load_weights
from pyruntime.scheduler import step_shapes
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import ForwardBatch, Task
from tests.models.architectures import BLOCK, DECODERS, factory_of, save
from tests.models.step_tape import TapeRecorder, tensors_of

NUM_BLOCKS = 64
MOST_ROWS = 6
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # another number of rows is another order of sums
OFTEN = {"gemma3_text", "qwen3_moe", "gpt2", "deepseek_v3"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So few rows are computed sooner by one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def body_of_a_device(folder: Path, model_type: str) -> LoadedModel:
    """The modules that run on a GPU, where nothing of ours stands in for them, on the CPU."""
    save(folder, model_type, DECODERS[model_type], factory_of(model_type, is_decoder=True))
    loaded = load_model(folder, "float32", "cpu")
    model = load_weights(folder, loaded.architecture, loaded.dtype).eval().requires_grad_(False)
    return dataclasses.replace(loaded, model=model, body=model.base_model)


class World:
    """Sequences step by step, through a runner with captured steps and, beside it, one without."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.shapes = StepShapes(MOST_ROWS, loaded.max_positions, NUM_BLOCKS, BLOCK)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.scheduler = Scheduler(self.pool, 96, 16)
        self.builder = BatchBuilder(BLOCK, "cpu", loaded.takes_token_types, self.shapes)
        self.plain_builder = BatchBuilder(BLOCK, "cpu", loaded.takes_token_types)
        caches = [KVCache(loaded.cache_shapes, NUM_BLOCKS, BLOCK, loaded.dtype, "cpu", has_spare=True) for _ in "ab"]
        self.captured, self.plain = (ModelRunner(loaded, cache) for cache in caches)
        self.recorder = TapeRecorder(tensors_of(loaded.body, caches[0]))
        self.standing = [self.recorder.stand(self.builder.padding(shape)) for shape in self.shapes.all()]
        batches = [(batch, self.builder.rehearsed(batch.shape)) for batch in self.standing]
        self.captured.captured = CapturedSteps(self.captured.compute, batches, self.recorder, 0.9999)
        self.num_rehearsed = self.recorder.num_replays

    def begin(self, *lengths: int) -> None:
        for length in lengths:
            tokens = [3 + (place * 5 + length) % 190 for place in range(length)]
            self.scheduler.add([Sequence(Task.GENERATE, tokens)])

    def step(self, drafts: tuple[int, ...] = ()) -> ForwardBatch:
        """One step of both, whose rows must agree, and one token more for every sequence that was read.

        ``drafts``: how many there are behind the first sequence, the second and so on.
        """
        plan = self.scheduler.schedule()
        for count, (sequence, _) in zip(drafts, plan.entries, strict=False):
            plan.draft(sequence, [5 + number for number in range(count)])
        padded, batch = self.builder.build(plan), self.plain_builder.build(plan)
        rows, wanted = self.captured.forward(padded), self.plain.forward(batch)
        assert torch.allclose(rows[: batch.num_tokens], wanted, **CLOSE)
        self.scheduler.advance(plan)
        for span in batch.rows:
            if span.reads:
                span.sequence.token_ids.append((7 * len(span.sequence) + span.start) % 190 + 3)
        return padded

    def until_all_decode(self) -> None:
        while self.step().shape is None:
            pass

    def end_one(self) -> None:
        self.scheduler.finish(min(self.scheduler.running))

    def assert_caches_agree(self) -> None:
        """What one has written the other has, and nothing else, but for the block of padding."""
        mine, other = self.captured.cache, self.plain.cache
        for layer in mine.keys:
            for own, wanted in ((mine.keys[layer], other.keys[layer]), (mine.values[layer], other.values[layer])):
                assert torch.allclose(own[:NUM_BLOCKS], wanted[:NUM_BLOCKS], **CLOSE)
                assert not wanted[NUM_BLOCKS].any()


@pytest.mark.parametrize(
    "model_type", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in DECODERS]
)
@torch.inference_mode()
def test_a_graph_of_each_architecture_would_do_as_its_forward_does(tmp_path: Path, model_type: str) -> None:
    world = World(body_of_a_device(tmp_path, model_type))
    world.begin(1, 20, 40)
    world.until_all_decode()
    for _ in range(3):
        world.step()
    assert world.num_rehearsed == 4 and world.recorder.num_replays == 8
    world.assert_caches_agree()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return body_of_a_device(tmp_path_factory.mktemp("llama"), "llama")


@torch.inference_mode()
def test_all_numbers_of_sequences_around_those_captured(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_shapes, "TABLE_TOKENS", (32, 64))
    world = World(llama)
    addresses = [each.input_ids.data_ptr() for each in world.standing]
    world.begin(1, 2, 3, 20, 5, 30, 7)
    seen = []
    while world.scheduler.running or world.scheduler.has_work:
        shape = world.step().shape
        seen.append((len(world.scheduler.running), shape and (shape.rows, shape.blocks)))
        if all(sequence.is_decoding for sequence in world.scheduler.running) and len(seen) % 2:
            world.end_one()
    sizes = dict(seen)
    assert [sizes[count] and sizes[count][0] for count in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 4, 4, 6, 6, None]
    assert {shape[1] for _, shape in seen if shape} == {2, 4}
    assert [each.input_ids.data_ptr() for each in world.standing] == addresses
    assert world.pool.num_used == 0 and world.pool.num_blocks == NUM_BLOCKS
    world.assert_caches_agree()


@torch.inference_mode()
def test_drafts_are_rows_as_others_are(llama: LoadedModel) -> None:
    world = World(llama)
    world.begin(4, 18)
    world.until_all_decode()
    for drafts, rows in (((1,), 4), ((1, 1), 4), ((0, 2), 4), ((2, 2), 6), ((4,), 6), ((5,), None), ((), 2)):
        shape = world.step(drafts).shape
        assert (shape and shape.rows) == rows, drafts
    world.assert_caches_agree()


@torch.inference_mode()
def test_steps_with_prompts_run_as_they_are(llama: LoadedModel) -> None:
    world = World(llama)
    world.begin(3)
    world.until_all_decode()
    before = world.recorder.num_replays
    world.begin(2)
    assert world.step().shape is None and world.recorder.num_replays == before
    assert world.step().shape is not None and world.recorder.num_replays == before + 1
