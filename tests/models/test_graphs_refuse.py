"""What a graph cannot do is refused before the capture, or found by the tape in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pyruntime.model import graphs
from pyruntime.model.graphs import CapturedSteps, CudaRecorder, NotCapturable, OnDeviceAlone
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import ForwardBatch
from tests.models.step_tape import NotTheSame, TapeRecorder

WEIGHT = torch.arange(12.0).view(4, 3)
BUILDER = BatchBuilder(4, "cpu", shapes=StepShapes(4, 32, 8, 4))
SHAPE = BUILDER.shapes.all()[0]
Forward = Callable[[ForwardBatch], torch.Tensor]


def rows(batch: ForwardBatch) -> torch.Tensor:
    return WEIGHT[batch.input_ids % 4] * (batch.positions[:, None] + 1.0)


def captured(forward: Forward) -> CapturedSteps:
    recorder = TapeRecorder({"weights": [WEIGHT]})
    batches = [(recorder.stand(BUILDER.padding(SHAPE)), BUILDER.rehearsed(SHAPE))]
    return CapturedSteps(forward, batches, recorder, 0.9999)


def batch_of(position: int) -> ForwardBatch:
    batch = BUILDER.padding(SHAPE)
    batch.positions[:] = torch.arange(4) + position
    batch.input_ids[:] = torch.arange(4)
    batch.kv_lengths[:] = position + 1
    return batch


@torch.inference_mode()
def test_a_forward_of_its_arrays_is_replayed() -> None:
    steps = captured(rows)
    answers = [steps.forward(batch_of(position)) for position in (3, 5)]
    assert answers[0] is answers[1]  # the answer stays where it is
    assert torch.equal(answers[1], rows(batch_of(5)))


@pytest.mark.parametrize(
    "forward",
    [
        lambda batch: rows(batch) * int(batch.kv_lengths.max()),
        lambda batch: rows(batch) if batch.positions.any() else WEIGHT.clone(),
        lambda batch: rows(batch) * len(batch.positions.tolist()),
        lambda batch: rows(batch)[batch.positions >= 0],
        lambda batch: rows(batch)[batch.positions.nonzero()[:, 0]],
        lambda batch: rows(batch).repeat_interleave(batch.kv_lengths, 0),
        lambda batch: rows(batch) * torch.tensor([2.0, 1.0, 1.0]),
        lambda batch: rows(batch).index_put_((batch.positions > 1,), torch.zeros(3)),
    ],
    ids=["item", "bool", "tolist", "mask", "nonzero", "repeats", "constant", "mask_put"],
)
def test_what_waits_for_the_device_is_refused(forward: Forward) -> None:
    with pytest.raises((NotCapturable, NotTheSame), match=r"aten\.|tolist"):
        captured(forward)


def test_what_moves_between_devices_is_refused() -> None:
    there = torch.zeros(3, device="meta")
    with OnDeviceAlone(there.device):
        there.to(torch.float64).add_(1.0).clamp(max=2.0)
        torch.zeros(3) + torch.tensor(1.0)  # the host's own
        for move in (lambda: torch.zeros(3).to("meta"), lambda: there.copy_(torch.zeros(3))):
            with pytest.raises(NotCapturable, match="from the host"):
                move()


class Forgetful:
    """Forwards that depend on more than the arrays, each in its way."""

    def __init__(self) -> None:
        self.count = 0
        self.table = torch.ones(4, 3)

    def counts_in_python(self, batch: ForwardBatch) -> torch.Tensor:
        self.count += 1
        return rows(batch) * self.count

    def branches_in_python(self, batch: ForwardBatch) -> torch.Tensor:
        self.count += 1
        return rows(batch) if self.count < 3 else rows(batch).neg()

    def grows(self, batch: ForwardBatch) -> torch.Tensor:
        self.count += 1
        return rows(batch) + torch.ones(self.count, 1).sum()

    def keeps_what_it_made(self, batch: ForwardBatch) -> torch.Tensor:
        before, self.table = self.table, rows(batch)
        return rows(batch) + before

    def changes_its_weights(self, batch: ForwardBatch) -> torch.Tensor:
        WEIGHT.mul_(1.0)
        return rows(batch)


@pytest.mark.parametrize("name", ["counts_in_python", "branches_in_python", "grows"])
@torch.inference_mode()
def test_what_depends_on_more_than_its_arrays_is_found(name: str) -> None:
    with pytest.raises(NotTheSame, match="captured"):
        captured(getattr(Forgetful(), name))


@pytest.mark.parametrize("name", ["keeps_what_it_made", "changes_its_weights"])
def test_memory_that_does_not_stand_still_is_found(name: str) -> None:
    with pytest.raises(NotTheSame, match=r"nobody keeps|writes to weights"):
        captured(getattr(Forgetful(), name))


def test_arrays_elsewhere_than_at_the_capture_are_found() -> None:
    """As if steps read the batch that they are given, and not the standing one."""
    recorder, batch = TapeRecorder({"weights": [WEIGHT]}), BUILDER.padding(SHAPE)
    given = [recorder.stand(batch)]
    replay, _ = recorder.record(lambda: rows(given[-1]))
    given.append(recorder.stand(batch_of(1)))
    with pytest.raises(NotTheSame, match="captured"):
        replay()


class Deaf:
    """A recorder whose replays do nothing."""

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return lambda: None, call()


def test_a_graph_that_answers_otherwise_is_refused() -> None:
    batches = [(BUILDER.padding(SHAPE), BUILDER.rehearsed(SHAPE))]
    with pytest.raises(NotCapturable, match=r"rows=4, blocks=8\) have cosine 0\."):
        CapturedSteps(rows, batches, Deaf(), 0.9999)


@pytest.mark.parametrize(
    ("dtype", "capability", "waits"),
    [(torch.bfloat16, (9, 0), False), (torch.bfloat16, (8, 0), True), (torch.float32, (9, 0), True)],
)
def test_a_product_of_experts_waits_unless_torch_has_a_kernel(
    dtype: torch.dtype, capability: tuple[int, int], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    op, on_a_gpu = torch.ops.aten._grouped_mm.default, SimpleNamespace(is_cuda=True, dtype=dtype, device=None)
    assert graphs.needs_values(op, (on_a_gpu,)) is waits


def test_a_graph_is_recorded_beside_what_other_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls, by stand-ins for torch's: warmed up and captured on one stream, the caller's given back."""
    done: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            done.append(f"waits for {other}")

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def block(*arguments: object, **options: object) -> Iterator[None]:
        done.append(f"begins {options}" if options else "within")
        yield
        done.append("ends")

    stands_in = {"Stream": lambda device: Stream(), "graph_pool_handle": lambda: (0, 1), "CUDAGraph": Graph}
    stands_in |= {"current_stream": lambda device: "the caller's", "device": block, "stream": block, "graph": block}
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    answer = torch.zeros(1)
    replay, hidden = CudaRecorder("cuda").record(lambda: done.append("call") or answer)
    replay()
    assert hidden is answer
    capture = ["begins {'capture_error_mode': 'thread_local'}", "call", "ends"]
    assert done == ["within", "within", "waits for the caller's", "call", *capture, "ends", "ends", "replay"]
