"""Whole models by the real runner on a device, against the same on the CPU: hidden rows, next tokens, speed.

    python tools/gpu_runner.py [--device cuda] [--model FOLDER]…

Without folders: a decoder and an encoder of the shapes of Gemma 3 270M and MiniLM with random weights. Each is loaded
as the server loads it and passes its self-check on the device first. The last line is JSON; a difference too large is
an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence as Arguments
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel, load_model
from pyruntime.model.probe import LEAST_COSINE
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.self_check import check_scheduler, run_batched, self_check

BLOCK = 16
LENGTHS = (1, 17, 64, 200, 700, 3)
BUDGET = 256  # tokens of a step, so that prompts are cut
DECODER = {
    "vocab_size": 8192, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 256,
    "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512, "max_position_embeddings": 4096,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
ENCODER = {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 12, "max_position_embeddings": 1024,
}  # fmt: skip
SHAPES = {"gemma3_text": (AutoModelForCausalLM, DECODER), "bert": (AutoModel, ENCODER)}


def save_random(folder: Path, model_type: str) -> Path:
    torch.manual_seed(0)
    factory, fields = SHAPES[model_type]
    model = factory.from_config(AutoConfig.for_model(model_type, pad_token_id=0, **fields)).eval()
    model.save_pretrained(folder / model_type)
    return folder / model_type


def parts(loaded: LoadedModel, num_tokens: int, budget: int) -> tuple[ModelRunner, Scheduler, BatchBuilder]:
    """As serving puts them together, with blocks for ``num_tokens``."""
    cache = pool = None
    if loaded.is_causal:
        num_blocks = num_tokens // BLOCK + len(LENGTHS) + 8
        cache = KVCache(loaded.cache_shapes, num_blocks, BLOCK, loaded.dtype, loaded.device)
        pool = BlockPool(num_blocks, BLOCK)
    builder = BatchBuilder(BLOCK if loaded.is_causal else 0, loaded.device, loaded.takes_token_types)
    return ModelRunner(loaded, cache), Scheduler(pool, budget, 64), builder


def checked(loaded: LoadedModel) -> float:
    """The self-check of the server: the least cosine of a row with transformers' eager output."""
    scheduler, num_blocks = check_scheduler(loaded, BLOCK)
    runner, _, builder = parts(loaded, num_blocks * BLOCK, BUDGET)
    return self_check(runner, scheduler, builder)


def texts_of(loaded: LoadedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [min(length, loaded.max_positions) for length in LENGTHS]
    return [torch.randint(3, loaded.vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def answers(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden rows of all texts [T, H] and each row's logits, on the CPU."""
    texts = texts_of(loaded)
    rows = torch.cat(run_batched(*parts(loaded, sum(map(len, texts)), BUDGET), texts))
    logits = loaded.output_head.logits(rows).float().cpu() if loaded.output_head is not None else None
    return rows.double().cpu(), logits


def tokens_per_second(loaded: LoadedModel) -> float:
    """Of prompts in steps of 2048 tokens, the host's part included: the best of three runs after one that warms up."""
    texts = [[3 + place % (loaded.vocab_size - 3) for place in range(min(512, loaded.max_positions))]] * 16
    best = float("inf")
    for _ in range(4):
        own = parts(loaded, sum(map(len, texts)) + 16 * BLOCK, 2048)
        begin = time.perf_counter()
        run_batched(*own, texts)
        if loaded.device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return sum(map(len, texts)) / best


def compare(folder: Path, dtype: str, device: str) -> dict[str, object]:
    on_device, on_cpu = load_model(folder, dtype, device), load_model(folder, dtype, "cpu")
    least = checked(on_device)
    (rows, logits), (want, wanted_logits) = answers(on_device), answers(on_cpu)
    cosine = torch.nn.functional.cosine_similarity(rows, want, dim=-1).min().item()
    figures: dict[str, object] = {
        "name": f"{folder.name}, {dtype}",
        "self_check": round(least, 6),
        "least_cosine_with_cpu": round(cosine, 6),
        "tokens_per_s": round(tokens_per_second(on_device)),
    }
    if logits is not None and wanted_logits is not None:
        gap = wanted_logits.topk(2).values.diff(dim=-1)[:, 0].abs()
        differ = logits.argmax(-1) != wanted_logits.argmax(-1)
        # A near tie may fall either way; in bfloat16 logits are rounded to steps, so that there are exact ones.
        figures["next_tokens_differ"] = int((differ & (gap > (1e-3 if dtype == "float32" else 0.1))).sum())
    if not cosine >= LEAST_COSINE[on_cpu.dtype] or (dtype == "float32" and figures.get("next_tokens_differ")):
        raise SystemExit(f"the device's rows differ from the CPU's: {figures}")
    return figures


def main(arguments: Arguments[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compares whole models on a device with the CPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, action="append", metavar="FOLDER", help="instead of the random ones")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.model or [save_random(Path(scratch), name) for name in SHAPES]
        figures = [compare(folder, dtype, options.device) for folder in folders for dtype in ("float32", "bfloat16")]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
