"""The CUDA kernels against plain torch, eager and compiled, and against the speed of a copy. The last line is JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyruntime.ops import attention, pooling, sampling, scores

ROWS, VOCABULARY, WIDTH = 64, 262_144, 640


@dataclass
class Case:
    name: str
    ours: Callable[[], object]
    plain: Callable[[], object]
    bytes_read: int  # what no implementation can avoid to read


def microseconds(call: Callable[[], object], runs: int = 20) -> float:
    """Median device time of a call, after three that warm up."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def pool_case() -> Case:
    sequences, length, width = 512, 128, 768
    hidden = torch.randn(sequences * length, width, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(0, sequences * length + 1, length, device="cuda", dtype=torch.int32)
    kinds = torch.full((sequences,), 2, device="cuda", dtype=torch.int32)
    flags = torch.ones(sequences, device="cuda", dtype=torch.bool)
    segment = torch.repeat_interleave(torch.arange(sequences, device="cuda"), length)

    def plain() -> torch.Tensor:
        sums = torch.zeros(sequences, width, device="cuda").index_add_(0, segment, hidden.float())
        return torch.nn.functional.normalize(sums / length, dim=-1)

    ours = lambda: pooling.pool(hidden, starts, kinds, kinds * 0 + width, flags)  # noqa: E731
    return Case("pool, mean of 512 × 128 rows of 768", ours, plain, hidden.numel() * 2)


def score_cases() -> list[Case]:
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") / math.sqrt(WIDTH)).bfloat16()
    cases = []
    for rows in (1, ROWS):
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, VOCABULARY, (rows * 10,), device="cuda")
        starts = torch.arange(0, rows * 10 + 1, 10, device="cuda", dtype=torch.int32)
        ones, grid = torch.ones(rows, device="cuda"), ids.view(rows, 10)

        def labels(x: torch.Tensor = x, grid: torch.Tensor = grid) -> torch.Tensor:
            return torch.softmax((x @ weight.T).float().gather(1, grid), -1)

        def whole(x: torch.Tensor = x, grid: torch.Tensor = grid) -> torch.Tensor:
            return torch.log_softmax((x @ weight.T).float(), -1).gather(1, grid).exp()

        shared = (x, weight, None, ids, starts)
        cases.append(
            Case(
                f"label_scores, {rows} rows × 10 labels", lambda a=(*shared, ones): scores.label_scores(*a), labels,
                ids.numel() * WIDTH * 2,
            )
        )  # fmt: skip
        cases.append(
            Case(
                f"label_probabilities, {rows} rows of {VOCABULARY}", lambda a=shared: scores.label_probabilities(*a),
                whole, weight.numel() * 2,
            )
        )  # fmt: skip
    return cases


def attention_cases() -> list[Case]:
    """Against torch's own attention over keys that lie dense, as a cache in pages does not."""
    heads, kv_heads, width = 32, 8, 128
    cases = []
    for name, queries, keys, count in (("decode, 32 × 4096 keys", 1, 4096, 32), ("prompt, 4 × 1024", 1024, 1024, 4)):
        q = torch.randn(count * queries, heads, width, device="cuda", dtype=torch.bfloat16)
        caches = torch.randn(2, count * keys // 16, 16, kv_heads, width, device="cuda", dtype=torch.bfloat16)
        tables = torch.randperm(count * keys // 16, device="cuda", dtype=torch.int32).view(count, -1)
        starts = torch.arange(0, count * queries + 1, queries, device="cuda", dtype=torch.int32)
        lengths = torch.full((count,), keys, device="cuda", dtype=torch.int32)
        k, v = (cache[tables.long()].flatten(1, 2).transpose(1, 2).contiguous() for cache in caches)
        dense = q.view(count, queries, heads, width).transpose(1, 2).contiguous()

        def ours(a: tuple = (q, *caches, starts, lengths, tables)) -> torch.Tensor:
            return attention.paged_attention(*a, scale=width**-0.5)

        def plain(a: tuple = (dense, k, v), causal: bool = queries > 1) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*a, is_causal=causal, enable_gqa=True)

        cases.append(Case(f"attention, {name}, bfloat16", ours, plain, caches.numel() * 2))
    return cases


def sample_case() -> Case:
    logits = torch.randn(ROWS, VOCABULARY, device="cuda") * 3
    whole = lambda value, dtype: torch.full((ROWS,), value, device="cuda", dtype=dtype)  # noqa: E731
    own = [whole(1.0, torch.float32), whole(50, torch.int32), whole(0.9, torch.float32), whole(0.0, torch.float32),
           whole(7, torch.int64), whole(1, torch.int64), whole(0, torch.int32)]  # fmt: skip

    def plain() -> torch.Tensor:
        values, ids = torch.topk(logits, 50)
        p = torch.softmax(values, -1)
        p = p.masked_fill(p.cumsum(-1) - p >= 0.9, 0)
        return ids.gather(1, torch.multinomial(p, 1))

    return Case(
        f"sample, {ROWS} × {VOCABULARY}, top-k 50, top-p 0.9", lambda: sampling.sample(logits, *own), plain,
        logits.numel() * 4,
    )  # fmt: skip


def copy_speed() -> dict[str, object]:
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    time = microseconds(lambda: target.copy_(source))
    return {"name": "copy of 1 GiB", "us": round(time, 1), "gb_s": round(2 * source.numel() / time / 1e3)}


def main() -> None:
    figures = [copy_speed()]
    for case in (pool_case(), *score_cases(), sample_case(), *attention_cases()):
        ours, eager = microseconds(case.ours), microseconds(case.plain)
        compiled = microseconds(torch.compile(case.plain))
        figures.append(
            {
                "name": case.name,
                "us": round(ours, 1),
                "gb_s": round(case.bytes_read / ours / 1e3),
                "eager_us": round(eager, 1),
                "compiled_us": round(compiled, 1),
                "against_best": round(min(eager, compiled) / ours, 2),
            }
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
