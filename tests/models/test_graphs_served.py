"""A served model whose decode steps are captured: the same answers, one block less, and ways out where they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pyruntime import serving
from pyruntime.config import Settings
from pyruntime.errors import ModelLoadError
from pyruntime.model import fused_layers
from pyruntime.model.graphs import NotCapturable
from pyruntime.registry import ServedModel
from pyruntime.serving import load_served_model
from pyruntime.types import GenerateRequest, SamplingParams, StopParams
from tests.models.byte_model import save_byte_model


class Again:
    """Replays by calling again; the answer stays where it is."""

    def __init__(self, device: str) -> None:
        self.num_recorded = self.num_replays = 0

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.num_recorded += 1
        answer = call().clone()

        def replay() -> None:
            self.num_replays += 1
            answer.copy_(call())

        return replay, answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Again]]:
    """The CPU as a device whose steps are captured."""
    made: list[Again] = []

    def make(device: str) -> Again:
        made.append(Again(device))
        return made[-1]

    monkeypatch.setattr(serving, "_has_graphs", lambda loaded, settings: settings.cuda_graphs == "on")
    monkeypatch.setattr(serving, "CudaRecorder", make)
    # As on a GPU: the CPU's body of fused layers reads positions on the host.
    monkeypatch.setattr(fused_layers, "put_stack", lambda *_: False)
    return made


def load(folder: Path, graphs: str, said: list[str] | None = None, **options: object) -> ServedModel:
    chosen = {"kv_cache_bytes": 2**20, "max_running_sequences": 5, "max_draft_rows": 5} | options
    settings = Settings(dtype="float32", deterministic=True, self_check=False, cuda_graphs=graphs, **chosen)
    return load_served_model("small", str(folder), settings, (said if said is not None else []).append)


def requests() -> list[GenerateRequest]:
    shared = [65, 66, 67] * 9  # so that there is something to guess
    prompts = [shared, [*shared, 70], [97], [98, 99, 100], list(range(60, 120)), [33] * 17, [5, 6]]
    sampling = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=3, logprobs=2)]
    stop = StopParams(max_new_tokens=24)
    return [GenerateRequest(ids, sampling[i % 2], stop) for i, ids in enumerate(prompts)]


async def answers(model: ServedModel) -> list[list[tuple[object, ...]]]:
    async def one(request: GenerateRequest) -> list[tuple[object, ...]]:
        events = [event async for some in model.engine.generate(request) for event in some]
        return [(event.token_id, event.logprob) for event in events]

    return list(await asyncio.gather(*map(one, requests())))


def test_answers_are_the_same(folder: Path, recorders: list[Again]) -> None:
    models = [load(folder, graphs) for graphs in ("on", "off")]
    try:
        captured, plain = (asyncio.run(answers(model)) for model in models)
        assert captured == plain and all(captured)
        (recorder,) = recorders
        assert recorder.num_recorded == 4 and recorder.num_replays > 20
        blocks = [model.engine.load().scheduler.blocks_free for model in models]
        assert blocks[0] == blocks[1] - 1  # the block of padding comes out of the budget
    finally:
        for model in models:
            close(model)


def test_what_cannot_be_captured_is_served_without(
    folder: Path, recorders: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Again, call: object) -> None:
        raise NotCapturable("aten.item needs values")

    monkeypatch.setattr(Again, "record", refuse)
    said: list[str] = []
    model = load(folder, "on", said)
    try:
        assert said[-1] == "small: decode steps run without graphs: aten.item needs values"
        assert all(asyncio.run(answers(model)))
    finally:
        close(model)


def test_a_capture_that_breaks_off_is_an_error(
    folder: Path, recorders: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Again, call: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Again, "record", fail)
    with pytest.raises(ModelLoadError, match=r"small: capturing .* is capturing\); cuda_graphs off does not"):
        load(folder, "on")


def test_the_option_switches_it_off(folder: Path, recorders: list[Again]) -> None:
    model = load(folder, "off")
    close(model)
    assert not recorders


def test_a_cpu_has_none() -> None:
    assert Settings().idle() == []
    assert Settings(cuda_graphs="on").idle() == ["--cuda-graphs does nothing without --device cuda"]
    assert Settings(cuda_graphs="on", device="cuda").idle() == []


def close(model: ServedModel) -> None:
    model.engine.close()
    model.release()
