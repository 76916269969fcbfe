"""Greedy streams of real weights: the screen of the output matrix says what all logits say, in both dtypes."""

from __future__ import annotations

import asyncio

import pytest
import torch

from pyruntime.heads.greedy import Greedy
from pyruntime.model.linear import packed_in_panels
from pyruntime.model.output_head import OutputHead
from pyruntime.ops.linear import linear_panels
from pyruntime.ops.screen import has_screen, largest_columns, make_screen
from pyruntime.types import GenerateRequest, SamplingParams, StopParams

PROMPTS = [
    "The history of Rome begins",
    "Once upon a time there was a dragon who",
    "def quicksort(xs):",
    "Number 7: system the latency and was queue",
    "one two three four five six",
    "Guten Morgen, wie geht es",
    "SELECT name, count(*) FROM",
    "0.1 0.2 0.3 0.4",
    "What is the capital of",
    "Roses are red,\nviolets are",
]


@pytest.mark.skipif(not has_screen(torch.bfloat16), reason="no screens on this processor")
async def test_real_weights(served, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model = served("gemma-3-270m", "float32")
    rows: list[torch.Tensor] = []
    whole: list[int] = []
    seen: list[int] = []
    heads: list[OutputHead] = []
    find = Greedy.find

    def compared(self, hidden, last, sequences):  # type: ignore[no-untyped-def]
        found = find(self, hidden, last, sequences)
        heads.append(self._head)
        rows.append(hidden[last])
        whole.extend(self._head.logits(rows[-1]).numpy().argmax(1).tolist())
        seen.extend(found.get(row, -1) for row in range(len(last)))
        return found

    async def generate(prompt: str) -> None:
        ids = model.tokenizer.encode(prompt)
        request = GenerateRequest(ids, SamplingParams(temperature=0.0), StopParams(24, token_ids=frozenset()))
        async for _ in model.engine.generate(request):
            pass

    monkeypatch.setattr(Greedy, "find", compared)
    await asyncio.gather(*(generate(prompt) for prompt in PROMPTS))
    decided = [(own, token) for own, token in zip(seen, whole, strict=True) if own >= 0]
    assert len(decided) > 0.9 * len(seen) >= 200
    assert all(own == token for own, token in decided)

    weight, x = heads[0].weight.bfloat16(), torch.cat(rows)[::2].bfloat16()
    panels, screen = packed_in_panels(weight), make_screen(weight)
    assert panels is not None and screen is not None
    products = linear_panels(x, panels).float()
    want = torch.from_numpy(products.numpy().argmax(1))
    for begin in range(0, len(x), 31):
        ids, values = largest_columns(x[begin : begin + 31], panels, screen)
        known = ids >= 0
        assert known.float().mean() > 0.9
        own = want[begin : begin + 31]
        assert torch.equal(ids[known], own[known])
        assert torch.equal(values[known], products[begin : begin + 31].gather(1, own[:, None])[known, 0])
