"""Captured steps on a GPU: replays follow their inputs, and other threads go on meanwhile."""

from __future__ import annotations

import threading

import torch

from pyruntime.model.graphs import CapturedSteps, CudaRecorder
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import ForwardBatch

BUILDER = BatchBuilder(16, "cuda", shapes=StepShapes(16, 64, 8, 16))


class Table:
    """A forward of products, so that a library's own memory is in it."""

    def __init__(self) -> None:
        self.table, self.weight = torch.randn(70, 256, device="cuda"), torch.randn(256, 256, device="cuda")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self.table[batch.input_ids] * batch.positions[:, None].float().cos()
        return torch.nn.functional.silu(rows @ self.weight) @ self.weight


def captured(table: Table) -> CapturedSteps:
    batches = [(BUILDER.padding(shape), BUILDER.rehearsed(shape)) for shape in BUILDER.shapes.all()]
    return CapturedSteps(table.forward, batches, CudaRecorder("cuda"), 0.999)


def check(steps: CapturedSteps, table: Table) -> None:
    for number, shape in enumerate(BUILDER.shapes.all() * 3):
        batch = BUILDER.padding(shape)
        batch.input_ids.random_(50)
        batch.positions.fill_(number)
        waste = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(20)]  # over what was let go of
        got = steps.forward(batch).clone()
        del waste
        assert torch.allclose(got, table.forward(batch), rtol=1e-3, atol=1e-3)


def test_replays_follow_their_inputs() -> None:
    table = Table()
    check(captured(table), table)


def test_other_threads_go_on_meanwhile() -> None:
    begun, ended, errors = threading.Event(), threading.Event(), []

    def work() -> None:
        try:
            while not ended.is_set():
                host = torch.ones(1 << 14).pin_memory()
                assert (host.to("cuda", non_blocking=True) * 2).sum().item() == 1 << 15
                begun.set()
        except BaseException as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        tables = [Table() for _ in range(3)]
        for table in tables:
            check(captured(table), table)
    finally:
        ended.set()
        thread.join()
    assert not errors
