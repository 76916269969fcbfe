"""Build facts, fakes and schemas, and the same answers from every instruction set of this processor."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pyruntime import ops
from tests.ops.instruction_sets import CAPABILITIES, CHOSEN, run


def test_build_info() -> None:
    facts = ops.build_info()
    assert facts["version"] and facts["compiler"] and facts["torch_version"]
    assert isinstance(facts["cuda"], bool)
    assert facts["cpu_capability"] in {"generic", "avx2", "avx512", "avx512bf16"}


def test_every_instruction_set_agrees() -> None:
    for capability in CAPABILITIES:
        chosen, *answers = run(capability)
        assert chosen == capability
        want = run("")[1].split()
        assert [float(x) for x in answers[0].split()] == pytest.approx([float(x) for x in want], rel=2e-4)
    assert run("")[0] == CHOSEN


def test_unknown_instruction_set_is_refused() -> None:
    assert "unknown or not in this processor" in run("sse9")[0]


def samples() -> list[tuple[torch._ops.OpOverloadPacket, tuple]]:
    """A small call of every op."""
    starts = torch.tensor([0, 3, 4]).int()
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    caches = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 8)
    tables = torch.tensor([[0, 1], [2, -1]]).int()
    one, names = torch.ones(2), torch.ops.pyruntime
    packed = ops.quantized.pack_int8(torch.randn(9, 8))
    wide = torch.randn(32, 8)
    return [
        (names.packed_attention, (q, kv, kv, starts, True, 0.3, -1, -1, 0.0, None)),
        (names.paged_attention, (q, *caches, starts, torch.tensor([4, 1]).int(), tables, True, 0.3, -1, 0.0, None)),
        (names.store_kv, (kv, kv, torch.tensor([0, 3, 4, 5]), *caches)),
        (names.copy_blocks, (*caches, torch.tensor([[0, 1]]))),
        (names.pool, (torch.randn(4, 8), starts, starts[:2] * 0, starts[1:] * 0 + 8, one > 0)),
        (names.pool_sparse, (torch.randn(4, 8), starts, torch.randn(9, 8))),
        (names.lexical_weights, (torch.randn(4, 8), starts, torch.arange(4), torch.randn(8), 0.1, torch.tensor([1]))),
        (names.delimiter_rows, (torch.tensor([1, 5, 5, 5]), starts, 5)),
        (names.label_logits, (torch.randn(2, 8), torch.randn(9, 8), None, torch.tensor([1, 8, 3, 3]), starts)),
        (
            names.label_scores,
            (torch.randn(2, 8), torch.randn(9, 8), None, torch.tensor([1, 8, 3, 3]), starts, one),
        ),
        (names.label_probabilities, (torch.randn(2, 8), torch.randn(9, 8), None, torch.tensor([1, 8, 3, 3]), starts)),
        (names.token_logprobs, (torch.randn(2, 8), torch.randn(9, 8), torch.randn(9), torch.tensor([1, 8]))),
        (names.linear_int8, (torch.randn(2, 8), packed, 9, torch.rand(9))),
        (names.linear_int8_into, (torch.randn(2, 8), packed, None, torch.randn(2, 9))),
        (names.logsumexp, (torch.randn(2, 8), torch.randn(9, 8), torch.randn(9), 0.0, 1.0)),
        (names.linear_rows, (torch.randn(2, 8), torch.randn(9, 8), None)),
        (names.linear_panels, (torch.randn(2, 8), torch.randn(9, 8), torch.randn(9), None, 1)),
        (names.linear_panels, (torch.randn(2, 8), ops.linear.pack_panels(torch.randn(32, 8)), torch.randn(32))),
        (
            names.linear_into,
            (torch.randn(2, 8), ops.linear.pack_panels(torch.randn(32, 8)), None, True, torch.randn(2, 32)),
        ),
        (names.linear_into, (torch.randn(2, 8), torch.randn(9, 8), None, False, torch.randn(2, 9))),
        (names.largest_columns, (one[:1] * wide[:2], ops.linear.pack_panels(wide), *ops.screen.make_screen(wide))),
        (names.rms_norm, (torch.randn(2, 8), torch.randn(8), 1e-6)),
        (names.layer_norm, (torch.randn(2, 8), torch.randn(2, 8), torch.randn(8), torch.randn(8), 1e-6)),
        (names.rotate_halves, (torch.randn(2, 3, 8), torch.randn(2, 8), torch.randn(2, 8))),
        (
            names.sample,
            (torch.randn(2, 9), one, starts[:2] * 0, one, one * 0, *[torch.zeros(2).long()] * 2, starts[:2] * 0),
        ),
    ]


def test_opcheck() -> None:
    for op, arguments in samples():
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


CALLS = pytest.mark.parametrize("index", range(len(samples())), ids=[op.__name__ for op, _ in samples()])


def tensors_of(arguments: tuple) -> list[int]:
    return [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]


@CALLS
def test_meta_tensors_never_mix_with_real_ones(index: int) -> None:
    op, arguments = samples()[index]
    names = [argument.name for argument in op.default._schema.arguments]
    tensors = tensors_of(arguments)
    first, others = tensors[0], tensors[1:]
    for i in others:
        mixed = [*arguments]
        mixed[i] = mixed[i].to("meta")
        with pytest.raises(RuntimeError, match=f"{names[i]}: expected a tensor on the device of {names[first]}, cpu"):
            op(*mixed)
    mixed = [*arguments]
    mixed[first] = mixed[first].to("meta")
    with pytest.raises(RuntimeError, match=f"{names[others[0]]}: .* {names[first]}, meta, got one on cpu"):
        op(*mixed)


def flat(answer: object) -> list[torch.Tensor]:
    return [answer] if isinstance(answer, torch.Tensor) else list(answer or ())


@CALLS
def test_all_meta_and_fake_calls_answer_the_kernels_shapes(index: int) -> None:
    op, arguments = samples()[index]
    want = [(t.shape, t.dtype) for t in flat(op(*arguments))]
    meta = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in arguments]
    got = flat(op(*meta))
    assert [(t.shape, t.dtype) for t in got] == want and all(t.is_meta for t in got)
    with FakeTensorMode() as mode:
        got = flat(op(*(mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in arguments)))
    assert [(t.shape, t.dtype) for t in got] == want
    assert all(isinstance(t, FakeTensor) and t.device.type == "cpu" for t in got)


@CALLS
def test_fakes_refuse_the_shapes_that_kernels_refuse(index: int) -> None:
    op, arguments = samples()[index]
    for i in tensors_of(arguments):
        wrong = [*arguments]
        wrong[i] = wrong[i].unsqueeze(0)
        with pytest.raises(RuntimeError):
            op(*wrong)
        with pytest.raises(RuntimeError, match="expected shape"):
            op(*(v.to("meta") if isinstance(v, torch.Tensor) else v for v in wrong))


def test_fakes_name_the_argument_of_the_wrong_shape() -> None:
    names = torch.ops.pyruntime
    x, w, ids = (torch.empty(*shape, device="meta") for shape in ((2, 8), (3, 9), (4,)))
    with pytest.raises(RuntimeError, match=r"^w: expected shape \[any, 8\], got \[3, 9\]"):
        names.linear_rows(x, w, None)
    with pytest.raises(RuntimeError, match=r"^weight: expected shape \[any, 8\]"):
        names.logsumexp(x, w, None, 0.0, 1.0)
    with pytest.raises(RuntimeError, match=r"^bias: expected shape \[3\], got \[4\]"):
        names.linear_rows(x, w[:, :8], ids)
    with pytest.raises(RuntimeError, match=r"^token_ids: expected shape \[2\], got \[4\]"):
        names.token_logprobs(x, w[:, :8], None, ids)
    with pytest.raises(RuntimeError, match=r"^bitmask: expected shape \[3, 1\], got \[3, 9\]"):
        names.sample(w, *[ids[:3]] * 7, bitmask=w)
    heads = torch.empty(4, 3, 8, device="meta")
    with pytest.raises(RuntimeError, match=r"^q: 3 heads is not a multiple of k's 2"):
        names.packed_attention(heads, heads[:, :2], heads[:, :2], ids, True, 1.0, -1, -1, 0.0, None)
