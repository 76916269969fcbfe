"""Build facts, fakes and schemas, and the same answers from every instruction set of this processor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pyruntime import ops

SMALL = """
import torch
from pyruntime import ops
torch.manual_seed(1)
starts = torch.tensor([0, 70, 75]).int()
q, k, v = (torch.randn(75, h, 40).bfloat16() for h in (4, 2, 2))
x, w = torch.randn(5, 70).bfloat16(), torch.randn(99, 70).bfloat16()
parts = [
    ops.attention.packed_attention(q, k, v, starts, causal=True, scale=0.2, softcap=9.0),
    ops.linear.linear_rows(x, w),
    ops.linear.linear_rows_int8(x, *ops.linear.quantize_int8(w)),
    torch.ops.pyruntime.pool_sparse(x, torch.tensor([0, 5]).int(), w),
    ops.scores.logsumexp(x, w),
    ops.pooling.pool(x, *[torch.tensor(p).int() for p in ([0, 5], [2], [70])], torch.tensor([True])),
]
print(ops.build_info()["cpu_capability"])
print(" ".join(str(float(p.double().abs().sum())) for p in parts))
"""


def run(capability: str) -> list[str]:
    environment = {**os.environ, "PYRUNTIME_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", SMALL], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


def test_build_info() -> None:
    facts = ops.build_info()
    assert facts["version"] and facts["compiler"] and facts["torch_version"]
    assert isinstance(facts["cuda"], bool)
    assert facts["cpu_capability"] in {"generic", "avx2", "avx512", "avx512bf16"}


def test_every_instruction_set_agrees() -> None:
    order = ["generic", "avx2", "avx512", "avx512bf16"]
    chosen = str(ops.build_info()["cpu_capability"])
    want = [float(x) for x in run("")[1].split()]
    for capability in order[: order.index(chosen) + 1]:
        lines = run(capability)
        assert lines[0] == capability
        assert [float(x) for x in lines[1].split()] == pytest.approx(want, rel=2e-4)


def test_unknown_instruction_set_is_refused() -> None:
    assert "unknown or not in this processor" in run("sse9")[0]


def test_opcheck() -> None:
    starts = torch.tensor([0, 3, 4]).int()
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    caches = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 8)
    tables = torch.tensor([[0, 1], [2, -1]]).int()
    one, names = torch.ones(2), torch.ops.pyruntime
    samples = [
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
        (names.linear_rows_int8, (torch.randn(2, 8), torch.ones(9, 8, dtype=torch.int8), torch.rand(9))),
        (names.logsumexp, (torch.randn(2, 8), torch.randn(9, 8), torch.randn(9), 0.0, 1.0)),
        (names.linear_rows, (torch.randn(2, 8), torch.randn(9, 8), None)),
        (
            names.sample,
            (torch.randn(2, 9), one, starts[:2] * 0, one, one * 0, *[torch.zeros(2).long()] * 2, starts[:2] * 0),
        ),
    ]
    for op, arguments in samples:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
