"""What a model's shape decides about its scheduler, with small random models served in process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from pyruntime.config import Settings
from pyruntime.errors import ModelLoadError
from pyruntime.machine import usable_cores
from pyruntime.model.loader import load_model
from pyruntime.serving import _equal_cost_depth, load_served_model
from pyruntime.types import GenerateRequest, SamplingParams, StopParams
from tests.fakes import byte_tokenizer

SIZES = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096}
WINDOW, BLOCK = 48, 16


def save(model: torch.nn.Module, folder: Path) -> str:
    model.eval().save_pretrained(folder)
    byte_tokenizer()._hf.save_pretrained(folder)
    return str(folder)


def test_attention_costs_as_much_as_the_linears_at_this_depth(tmp_path: Path):
    folder = save(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    linears = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128  # of a layer: q, k, v, o and the three of its network
    pair = 4 * (16 + 16)  # of a layer: scores and values of four heads
    assert _equal_cost_depth(load_model(Path(folder), "float32", "cpu")) == linears // pair


async def test_a_model_of_windows_alone_lets_go_of_what_it_no_longer_reads(tmp_path: Path):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))
    folder = save(model, tmp_path)
    settings = Settings(kv_cache_bytes=2**20, kv_block_size=BLOCK, max_batch_tokens=64, prefix_cache=False)
    served = load_served_model("m", folder, settings, print)
    prompt = torch.randint(3, 256, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    stop = StopParams(max_new_tokens=40, token_ids=frozenset())
    request = GenerateRequest(prompt=prompt, sampling=SamplingParams(temperature=0), stop=stop)
    own, most_used = [], 0
    async for events in served.engine.generate(request):
        own += [event.token_id for event in events]
        most_used = max(most_used, served.engine.num_blocks_used)
    served.close()
    # The window, the tile of keys that its edge lies in, and the blocks that the two ends cut: far from all 28.
    assert 0 < most_used <= (WINDOW + 64) // BLOCK + 2
    eager = MistralForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = eager(input_ids=torch.tensor([prompt + own[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(own)[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen).max() < 1e-3


def test_weights_larger_than_what_is_free_are_refused_before_they_are_read(tmp_path: Path, monkeypatch):
    folder = save(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    monkeypatch.setattr("pyruntime.serving.free_bytes", lambda device: size - 1)
    monkeypatch.setattr("pyruntime.serving.load_model", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ModelLoadError, match=f"its weights are {size} bytes; {size - 1} are free on cpu"):
        load_served_model("m", folder, Settings(), print)


def test_a_served_model_is_closed_as_often_as_one_likes(tmp_path: Path):
    folder = save(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    served = load_served_model("m", folder, Settings(kv_cache_bytes=2**20, self_check=False), print)
    served.close()
    served.close()
    assert served.engine.is_closed


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, min(2, usable_cores())), (4096, usable_cores())])
def test_threads_are_what_the_settings_say_within_the_cores(tmp_path: Path, threads: int, expected: int):
    before = torch.get_num_threads()
    try:
        folder = save(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
        settings = Settings(kv_cache_bytes=2**20, self_check=False, threads=threads)
        load_served_model("m", folder, settings, print).close()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
