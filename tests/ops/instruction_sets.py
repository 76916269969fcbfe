"""A program under each instruction set of this processor, run once for all tests that look at its answers."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from pyruntime import ops

ORDER = ("generic", "avx2", "avx512", "avx512bf16")
CHOSEN = str(ops.build_info()["cpu_capability"])
CAPABILITIES = ORDER[: ORDER.index(CHOSEN)]  # that can be asked for besides

PROGRAM = """
import torch
from pyruntime import ops
torch.manual_seed(1)
starts = torch.tensor([0, 70, 75]).int()
q, k, v = (torch.randn(75, h, 40).bfloat16() for h in (4, 2, 2))
x, w = torch.randn(5, 70).bfloat16(), torch.randn(99, 70).bfloat16()
x[:, 0] = w[7, 0] = 70
panels = ops.linear.pack_panels(w[:96].float())
parts = [
    ops.attention.packed_attention(q, k, v, starts, causal=True, scale=0.2, softcap=9.0),
    ops.linear.linear_rows(x, w),
    ops.linear.linear_rows(x, w, None, w, "silu"),
    ops.linear.linear_panels(x.float(), w.float(), None, None, "gelu"),
    ops.between.rms_norm(x, x[0], 1e-6),
    ops.between.layer_norm(x, x, x[0], x[1], 1e-6),
    ops.between.rotate_halves(q[:5], *[torch.randn(5, 40).bfloat16() for _ in range(2)]),
    ops.quantized.linear_int8(x, ops.quantized.pack_int8(w), 99),
    ops.screen.largest_columns(x.float(), panels, ops.screen.make_screen(w[:96].float()))[1],
    torch.ops.pyruntime.pool_sparse(x, torch.tensor([0, 5]).int(), w),
    ops.scores.logsumexp(x, w),
    ops.pooling.pool(x, *[torch.tensor(p).int() for p in ([0, 5], [2], [70])], torch.tensor([True])),
]
print(ops.build_info()["cpu_capability"])
print(" ".join(str(float(p.double().abs().sum())) for p in parts))
torch.manual_seed(5)
logits = torch.randn(40, 3001) * 3
top_k = torch.randint(-1, 99, (40,)).int()
arguments = (torch.rand(40) + 0.3, top_k, torch.rand(40) * 0.5 + 0.5, torch.rand(40) * 0.02)
counters = (torch.arange(40), torch.arange(40) * 7, torch.arange(40).int())
answer = ops.sampling.sample_with_logprobs(logits, *arguments, *counters, top=5)
print(answer.ids.tolist(), answer.top_ids.tolist(), answer.logprobs.tolist(), answer.top_logprobs.tolist())
"""


@functools.cache
def run(capability: str) -> list[str]:
    """What was chosen, sums of all sorts of answers, and draws, a line each; or what went wrong."""
    environment = {**os.environ, "PYRUNTIME_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]
