"""Models whose linears are int8: how near their answers are, that rows stay apart, what is told and what is refused."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from pyruntime.config import Settings
from pyruntime.errors import ModelLoadError
from pyruntime.model import quantized
from pyruntime.model.loader import load_model
from pyruntime.model.quantized import QuantizedLinear
from pyruntime.service.convert import model_message
from pyruntime.serving import load_served_model
from pyruntime.types import EmbedRequest, GenerateRequest, PoolingType, SamplingParams, StopParams
from tests.fakes import byte_tokenizer
from tests.models.texts import WORDS

SIZES = {"vocab_size": 261, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 144, "max_position_embeddings": 512, "pad_token_id": 0}
INT8 = Settings(quantization="int8", dtype="float32", kv_cache_bytes=2**20)


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    byte_tokenizer()._hf.save_pretrained(folder)
    return folder


def llama(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**SIZES | changes)), folder)


async def generated(model: Any, prompt: list[int]) -> list[tuple[int, float]]:
    request = GenerateRequest(
        prompt, SamplingParams(temperature=0.0, logprobs=0), StopParams(24, token_ids=frozenset())
    )
    return [(event.token_id, event.logprob) async for events in model.engine.generate(request) for event in events]


async def test_vectors_of_real_weights(served, folders) -> None:  # type: ignore[no-untyped-def]
    generator = random.Random(5)
    texts = [" ".join(generator.choice(WORDS) for _ in range(1 + 4 * i)) for i in range(48)]
    model = load_served_model("minilm", folders["all-minilm-l6-v2"], Settings(quantization="int8"), print)
    found = []
    for each in (model, served("all-minilm-l6-v2", "float32")):
        request = EmbedRequest(each.tokenizer.encode_batch(texts), PoolingType.MEAN, True, 384)
        found.append(np.stack([result.values for result in (await each.engine.embed(request))[0]]))
    model.close()
    assert (found[0] * found[1]).sum(axis=1).min() >= 0.995
    assert model.info.weights_bytes < 0.7 * served("all-minilm-l6-v2", "float32").info.weights_bytes


@pytest.mark.slow
async def test_real_weights_of_a_decoder_go_on_as_before(served, folders) -> None:  # type: ignore[no-untyped-def]
    """Loaded with the self-check, whose texts of random tokens are the hardest that there are."""
    prompts = ["The capital of France is", "Water boils at a temperature of", "one two three four five six"]
    model = load_served_model(
        "gemma", folders["gemma-3-270m"], INT8.model_copy(update={"kv_cache_bytes": 2**28}), print
    )
    same = []
    for prompt in prompts:
        plain = await generated(served("gemma-3-270m", "float32"), model.tokenizer.encode(prompt))
        same.append((await generated(model, model.tokenizer.encode(prompt)))[0][0] == plain[0][0])
    model.close()
    assert sum(same) >= 2


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_decoder_answers_what_its_eager_form_does(tmp_path: Path, deterministic: bool) -> None:
    """Its own eager form, quantised too, is the reference: that one differs from plain weights is seen below."""
    folder = llama(tmp_path)
    model = load_served_model("m", str(folder), INT8.model_copy(update={"deterministic": deterministic}), print)
    prompts = [[3 + (7 * i + j) % 250 for j in range(9 + 40 * i)] for i in range(4)]
    alone = [await generated(model, prompt) for prompt in prompts]
    together = await asyncio.gather(*(generated(model, prompt) for prompt in prompts))
    assert model_message(model, Settings()).quantization == "int8"
    model.close()
    if deterministic:
        assert together == alone
    loaded = load_model(folder, "float32", "cpu", quantization="int8")
    kinds = [type(module) for module in loaded.body.modules() if isinstance(module, torch.nn.Linear)]
    assert kinds == [QuantizedLinear] * 14
    assert loaded.output_head is not None
    for prompt, events in zip(prompts, together, strict=True):
        own = [token for token, _ in events]
        with quantized.eager_attention(loaded.model):
            hidden = loaded.body(input_ids=torch.tensor([prompt + own[:-1]])).last_hidden_state[0, len(prompt) - 1 :]
        logits = loaded.output_head.logits(hidden).float()
        chosen = logits.gather(1, torch.tensor(own)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < 0.02


def test_logits_stay_near_those_of_plain_weights(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    plain, own = (load_model(folder, "float32", "cpu", quantization=kind) for kind in ("none", "int8"))
    rows = [quantized._rows(each.model, 0) for each in (plain, own)]
    assert torch.nn.functional.cosine_similarity(*rows, dim=-1).min() > 0.995
    assert plain.output_head is not None and own.output_head is not None
    few, many = (own.output_head.logits(rows[0][:count]) for count in (3, 64))
    assert torch.equal(few, many[:3])
    assert torch.nn.functional.cosine_similarity(plain.output_head.logits(rows[0]), many, dim=-1).min() > 0.999
    assert own.output_head.weight is own.model.get_output_embeddings().weight


@pytest.mark.parametrize("width", [144, 136])
def test_gates_in_one_matrix_with_their_values(tmp_path: Path, width: int) -> None:
    torch.manual_seed(0)
    folder = save(Phi3ForCausalLM(Phi3Config(**SIZES | {"intermediate_size": width})), tmp_path)
    loaded = load_model(folder, "float32", "cpu", quantization="int8")
    merged = loaded.body.layers[0].mlp.gate_up_proj
    # Where the halves do not end with a panel it cannot be cut in two, and stays as it is.
    assert isinstance(merged, QuantizedLinear) == (width % 16 == 0)
    load_served_model("m", str(folder), INT8, print).close()  # the self-check has compared it with its plain modules


def test_values_of_weights_that_became_int8_cannot_be_read(tmp_path: Path) -> None:
    linear = load_model(llama(tmp_path), "float32", "cpu", quantization="int8").body.layers[0].mlp.down_proj
    assert linear.weight.shape == (64, 144) and linear.weight.dtype is torch.float32
    x = torch.randn(144, 5)
    assert torch.equal(linear(x.T), linear(x.T.contiguous()))  # some bodies turn their rows before
    with pytest.raises(RuntimeError, match="meta tensors"):
        linear.weight.sum().item()


def test_what_cannot_be_quantised_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama(tmp_path / "llama")
    with pytest.raises(ModelLoadError, match="quantization int8 is for device cpu, not cuda:0"):
        load_model(folder, "float32", "cuda:0", quantization="int8")
    sizes = {"vocab_size": 261, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    gpt2 = save(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path / "gpt2")
    with pytest.raises(ModelLoadError, match="no linear layers to quantise"):
        load_model(gpt2, "float32", "cpu", quantization="int8")
    monkeypatch.setattr(quantized, "LEAST_COSINE", 0.999999)
    with pytest.raises(ModelLoadError, match="changes its answers too much"):
        load_model(folder, "float32", "cpu", quantization="int8")
