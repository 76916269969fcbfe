"""Whose fault a failed forward is: found by running halves again, within bounds."""

import math

import pytest

from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.step_runner import MAX_RERUNS, DeviceLost, StepRunner, is_fatal
from pyruntime.types import Task
from tests.fake_compute import FakeModel


class Picky(FakeModel):
    """Raises for every batch that holds a token of ``poison``; keeps and uses up rows as a pooler does."""

    def __init__(self, poison, error=None):
        super().__init__()
        self.poison = set(poison)
        self.error = error or RuntimeError("poison")
        self.copies = []

    def build(self, plan):
        self.copies.append(list(plan.block_copies))
        return super().build(plan)

    def read(self, hidden, batch):
        for rows in batch.rows:
            rows.sequence.partial_hidden.append(len(self.batches))
        if any(self.poison & set(rows.sequence.token_ids) for rows in batch.rows):
            raise self.error
        return super().read(hidden, batch)


class Owner:
    pass


def plan_of(*owned):
    """One entry a token, each list of tokens one request's."""
    plan = StepPlan()
    for block, (owner, token) in enumerate((owner, t) for tokens in owned for owner in [Owner()] for t in tokens):
        sequence = Sequence(Task.EMBED, [token], owner=owner, state=State.RUNNING, blocks=[block])
        plan.add(sequence, 1)
    return plan


def run(model, plan, **options):
    return StepRunner(model, model, model, **options).run(plan)


def tokens_of(outcome):
    return sorted(output[0] for _, output in outcome.outputs)


def test_a_step_that_works_runs_once():
    model = Picky([])
    outcome = run(model, plan_of([1], [2, 3]))
    assert (tokens_of(outcome), outcome.failed, len(model.batches)) == ([1, 2, 3], {}, 1)


@pytest.mark.parametrize("size", [2, 3, 64, 256])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_one_culprit_is_found_in_a_logarithm_of_runs(size, place):
    plan = plan_of(*([token] for token in range(size)))
    culprit = plan.entries[place][0]
    model = Picky(culprit.token_ids)
    outcome = run(model, plan)
    assert list(outcome.failed) == [culprit.owner]
    assert tokens_of(outcome) == sorted(set(range(size)) - model.poison)
    assert len(model.batches) <= 1 + 2 * math.ceil(math.log2(size))


def test_a_request_alone_is_not_run_again():
    model = Picky([3])
    outcome = run(model, plan_of([1, 2, 3, 4]))
    assert (len(outcome.failed), outcome.outputs, len(model.batches)) == (1, [], 1)


def test_several_culprits_and_their_neighbours():
    plan = plan_of(*([token] for token in range(32)))
    outcome = run(Picky([4, 21]), plan)
    assert tokens_of(outcome) == sorted(set(range(32)) - {4, 21})
    assert {plan.entries[place][0].owner for place in (4, 21)} == set(outcome.failed)


def test_when_everything_fails_the_batch_fails_after_a_bounded_number_of_runs():
    model = Picky(range(256))
    plan = plan_of(*([token] for token in range(256)))
    outcome = run(model, plan)
    assert outcome.failed.keys() == {sequence.owner for sequence, _ in plan.entries}
    assert len(model.batches) <= 1 + MAX_RERUNS


def test_a_copy_is_made_again_with_the_half_that_needs_it():
    plan = plan_of([0], [1], [2], [3])
    plan.block_copies = [(9, 0), (9, 3)]
    model = Picky([1])
    run(model, plan)
    assert model.copies == [[(9, 0), (9, 3)], [(9, 0)], [(9, 0)], [], [(9, 3)]]


def test_rows_of_earlier_chunks_are_as_before_when_a_part_runs_again():
    plan = plan_of([0], [1])
    for sequence, _ in plan.entries:
        sequence.partial_hidden = ["earlier"]
    run(Picky([1]), plan)
    good, bad = (sequence.partial_hidden for sequence, _ in plan.entries)
    assert good == ["earlier", 2]
    assert bad == ["earlier"]


def test_memory_that_ran_out_fails_only_what_is_too_large_alone():
    class Small(FakeModel):
        def forward(self, batch):
            super().forward(batch)
            if len(batch.rows) > 2:
                raise MemoryError
            return None

    model = Small()
    outcome = run(model, plan_of(*([token] for token in range(8))))
    assert (tokens_of(outcome), outcome.failed) == (list(range(8)), {})


def test_a_lost_device_is_not_tried_again():
    model = Picky([1], RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceLost, match="RuntimeError: CUDA error: an illegal memory access"):
        run(model, plan_of([0], [1]))
    assert len(model.batches) == 1


def test_what_counts_as_fatal_can_be_said_from_outside():
    with pytest.raises(DeviceLost):
        run(Picky([1]), plan_of([0], [1]), fatal=lambda error: "poison" in str(error))


def torch_error(name):
    return type(name, (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (torch_error("AcceleratorError")("unspecified launch failure"), True),
        (type("Sub", (torch_error("AcceleratorError"),), {})(""), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("device-side assert triggered"), True),
        (torch_error("OutOfMemoryError")("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (torch_error("AcceleratorError")("CUDA error: out of memory"), False),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (MemoryError(), False),
        (KeyError("x"), False),
    ],
)
def test_which_errors_lose_the_device(error, fatal):
    assert is_fatal(error) is fatal


def test_torch_still_has_the_names_that_are_looked_for():
    import torch

    assert issubclass(torch.AcceleratorError, RuntimeError)
    assert not is_fatal(torch.OutOfMemoryError("CUDA out of memory."))
