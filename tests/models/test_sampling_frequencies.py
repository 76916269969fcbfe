"""How often each token is drawn through the whole service, against what transformers' processors leave of the logits.

The model says the same whatever it has read, so that every token of a continuation is a draw from one distribution.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.v1 import generate_pb2
from tests.models.byte_model import channel_to, save_byte_model

N = 128
OPTIONS = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.004}


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    """(the served model, its logits as transformers computes them)."""
    folder = save_byte_model(tmp_path_factory.mktemp("constant"))
    eager = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(4)
    eager.model.embed_tokens.weight.data[:] = torch.randn(32, generator=generator)
    eager.lm_head.weight.data = torch.randn(260, 32, generator=generator) * 0.4
    eager.save_pretrained(folder)
    logits = eager(torch.randint(0, 256, (1, 90), generator=generator)).logits[0]
    assert (logits - logits[0]).abs().max() < 1e-4
    model = load_served_model("constant", folder, Settings(dtype="float32"), lambda _: None)
    yield model, logits[0].double()
    model.engine.close()


def probabilities(logits: torch.Tensor, options: dict) -> np.ndarray:
    steps = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    warpers = LogitsProcessorList([step(options[name]) for name, step in steps.items() if name in options])
    return torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.long), logits[None]), -1)[0].numpy()


async def drawn(model, options: dict, seeds: range, length: int) -> np.ndarray:
    """int [seeds, n, length]: requests one after the other over a real channel, streamed and whole by turns."""
    tokens = np.zeros((len(seeds), N, length), dtype=np.int64)
    async with channel_to(model) as stub:
        for place, seed in enumerate(seeds):
            request = generate_pb2.GenerateRequest(
                text="any",
                n=N,
                sampling=options | {"seed": seed},
                stop={"max_new_tokens": length, "ignore_eos": True},
                chunk_tokens=1024,
            )
            if place % 2:
                pieces = [chunk async for chunk in stub.GenerateStream(request)]
            else:
                pieces = (await stub.Generate(request)).completions
            for piece in pieces:
                tokens[place, piece.index] = piece.token_ids
    return tokens


def limit(freedom: int) -> float:
    """The 1 - 1e-6 quantile of chi-square, by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 4.7534 * (2 / (9 * freedom)) ** 0.5) ** 3


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom), rare cells put together."""
    common = expected >= 5
    rest = expected[~common].sum()
    cells = [*zip(counts[common], expected[common], strict=True)]
    cells += [(counts[~common].sum(), rest)] if rest > 1 else []
    return sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1


# The more draws the smaller the mistakes that show; the hundred thousand run in `make test-all`.
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "filtered"])
@pytest.mark.parametrize("num_seeds", [1, pytest.param(8, marks=pytest.mark.slow)])
async def test_frequencies(constant, num_seeds, options):
    model, logits = constant
    share = probabilities(logits, options)
    tokens = await drawn(model, options, range(num_seeds), 100)
    counts = np.bincount(tokens.flatten(), minlength=len(share))
    assert counts.sum() == num_seeds * N * 100
    assert counts[share == 0].sum() == 0
    statistic, freedom = chi_square(counts, share * counts.sum())
    assert freedom > 25
    assert statistic < limit(freedom)
    for neighbours in pairs(tokens):
        check_independence(neighbours, share)


def pairs(tokens: np.ndarray) -> list[np.ndarray]:
    """[2, draws] that differ in position alone, in the continuation alone, and in the seed alone."""
    found = [np.stack([tokens[..., :-1], tokens[..., 1:]]), np.stack([tokens[:, :-1], tokens[:, 1:]])]
    found += [np.stack([tokens[a], tokens[b]]) for a, b in itertools.pairwise(range(len(tokens)))]
    return [each.reshape(2, -1) for each in found]


def check_independence(neighbours: np.ndarray, share: np.ndarray) -> None:
    """Pairs of tokens are as frequent as the product of their shares."""
    size = len(share)
    counts = np.bincount(neighbours[0] * size + neighbours[1], minlength=size * size)
    statistic, freedom = chi_square(counts, np.outer(share, share).flatten() * counts.sum())
    assert statistic < limit(freedom)
