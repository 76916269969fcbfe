"""Greedy tokens of small random models in float32 against transformers' generate, token by token, in mixed batches."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.types import EmbedRequest, GenerateRequest, PoolingType, SamplingParams, StopParams
from tests.fakes import byte_tokenizer
from tests.models.architectures import DECODERS, save

NEW_TOKENS = 20
# Around the page (16), the step (24) and the window (32), well past it, and some that end past it.
LENGTHS = (1, 16, 17, 25, 33, 48, 100, 150)
CLOSE_CALL = 1e-4  # of logits that spread over several units
MORE_FIELDS = {
    "phi3": {"sliding_window": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
}
# The others run in `make test-all`.
SOON = "llama qwen3 gemma2 mistral phi3 gpt2 cohere olmo2 granite smollm3 glm4 gpt_oss mixtral qwen3_moe".split()
CASES = [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]


def ids_of(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(1, 250) for _ in range(length)]


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A random model served with steps of at most 24 tokens, and its eager twin."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    save(folder, name, DECODERS[name] | {"vocab_size": 264} | MORE_FIELDS.get(name, {}), AutoModelForCausalLM)
    byte_tokenizer()._hf.save_pretrained(folder)
    num_threads = torch.get_num_threads()
    settings = Settings(dtype="float32", kv_cache_bytes=2**20, max_batch_tokens=24, threads=1)
    model = load_served_model(name, folder, settings, lambda _: None)
    yield model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.engine.close()
    torch.set_num_threads(num_threads)  # loading sets it for the whole process; so small models are faster on one


def reference(eager, ids: list[int]) -> tuple[list[int], list[float]]:
    """(transformers' continuation, the gap between its two largest logits at each step)."""
    output = eager.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = [logits[0].topk(2).values for logits in output.logits]
    return output.sequences[0, len(ids) :].tolist(), [float(two[0] - two[1]) for two in top]


async def tokens_of(engine, ids, n=1, count=NEW_TOKENS, **sampling) -> list[list[int]]:
    """Of each continuation."""
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    found: list[list[int]] = [[] for _ in range(n)]
    async for events in engine.generate(GenerateRequest(ids, params, StopParams(count), n)):
        for event in events:
            found[event.index].append(event.token_id)
    return found


def assert_same(own, expected, gaps):
    for step, (mine, theirs) in enumerate(zip(own, expected, strict=True)):
        if mine != theirs:
            assert gaps[step] <= CLOSE_CALL, f"step {step}: {mine} instead of {theirs}, gap {gaps[step]:.4f}"
            return


async def test_greedy_tokens_in_a_mixed_batch(pair):
    """Greedy streams of all lengths, one twice, beside sampled ones and texts to embed; then again, from the cache."""
    model, eager = pair
    engine = model.engine
    prompts = [ids_of(length, length) for length in LENGTHS]
    expected = [reference(eager, ids) for ids in prompts]
    assert len({tuple(tokens) for tokens, _ in expected}) == len(LENGTHS)
    for _ in range(2):
        greedy = [tokens_of(engine, ids, 1 + (len(ids) in (17, 100))) for ids in prompts]
        sampled = [tokens_of(engine, ids_of(9 * i + 5, i), 2, 10 + i, temperature=1.0, seed=i) for i in range(6)]
        texts = EmbedRequest([ids_of(20, 70), ids_of(90, 71)], PoolingType.MEAN, True, model.info.embedding_dimensions)
        answers = await asyncio.gather(*greedy, *sampled, engine.embed(texts))
        for continuations, (tokens, gaps) in zip(answers, expected, strict=False):
            for own in continuations:
                assert_same(own, tokens, gaps)
