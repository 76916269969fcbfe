"""Before a model is served: its packed output is compared with transformers' eager output, text by text."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch

from pyruntime.errors import ModelLoadError
from pyruntime.model.loader import LoadedModel
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import Task

# Least cosine between a packed and an eager hidden row. Two bfloat16 orders of summation differ by about
# 1e-3 on random tokens; a wrong mask, position or window costs far more.
LEAST_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.98, torch.float16: 0.99}
CHUNK_TOKENS = 96


def self_check(runner: ModelRunner, scheduler: Scheduler, builder: BatchBuilder) -> float:
    """Least cosine over all rows, or ``ModelLoadError``. Covers mixed lengths, chunks, pages and the window."""
    loaded = runner.loaded
    texts = _texts(loaded)
    packed = _run_packed(runner, scheduler, builder, texts)
    eager = _run_eager(loaded, texts)
    least = 1.0
    for ids, own, reference in zip(texts, packed, eager, strict=True):
        cosine = torch.nn.functional.cosine_similarity(own.double(), reference.double(), dim=-1).min().item()
        least = min(least, cosine)
        if not cosine >= LEAST_COSINE[loaded.dtype]:
            raise ModelLoadError(
                f"{loaded.architecture}: on a text of {len(ids)} tokens the packed forward differs from eager "
                f"transformers (least cosine of a row {cosine:.4f}, allowed {LEAST_COSINE[loaded.dtype]})"
            )
    _check_logits(loaded, eager[1], texts[1])  # a short text: eager logits of every row are large
    return least


def check_scheduler(loaded: LoadedModel, block_size: int) -> tuple[Scheduler, int]:
    """A scheduler that cuts prompts small, and how many cache blocks it needs."""
    if not loaded.is_causal:
        return Scheduler(None, CHUNK_TOKENS, 8), 0
    num_blocks = sum(-(-len(ids) // block_size) + 1 for ids in _texts(loaded))
    return Scheduler(BlockPool(num_blocks, block_size), CHUNK_TOKENS, 8), num_blocks


def _texts(loaded: LoadedModel) -> list[list[int]]:
    windows = [traits.window for traits in loaded.layers.values() if traits.window]
    longest = max(windows) + 9 if windows and max(windows) <= 1024 else 70
    generator = random.Random(0)
    lengths = [min(length, loaded.max_positions) for length in (1, 17, longest)]
    return [[generator.randrange(3, loaded.vocab_size) for _ in range(length)] for length in lengths]


def _run_packed(
    runner: ModelRunner, scheduler: Scheduler, builder: BatchBuilder, texts: list[list[int]]
) -> list[torch.Tensor]:
    sequences = [Sequence(Task.EMBED, list(ids)) for ids in texts]
    rows: dict[Sequence, list[torch.Tensor]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.add([sequence])
    while scheduler.has_work:
        plan = scheduler.schedule()
        batch = builder.build(plan)
        hidden = runner.forward(batch)
        scheduler.advance(plan)
        for span in batch.rows:
            rows[span.sequence].append(hidden[span.start : span.start + span.length])
            if span.reads:
                scheduler.finish(span.sequence)
    return [torch.cat(rows[sequence]) for sequence in sequences]


@contextlib.contextmanager
def _eager_attention(loaded: LoadedModel) -> Iterator[None]:
    """transformers' own attention while the block runs, the packed one afterwards whatever happens."""
    packed_name = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        loaded.model.set_attn_implementation(packed_name)


@torch.inference_mode()
def _run_eager(loaded: LoadedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    with _eager_attention(loaded):
        return [loaded.body(input_ids=torch.tensor([ids], device=loaded.device)).last_hidden_state[0] for ids in texts]


@torch.inference_mode()
def _check_logits(loaded: LoadedModel, hidden: torch.Tensor, ids: list[int]) -> None:
    """The output head's scale and softcap against the model's own logits."""
    if loaded.output_head is None:
        return
    with _eager_attention(loaded):
        reference = loaded.model(input_ids=torch.tensor([ids], device=loaded.device)).logits[0, -1].float()
    own = loaded.output_head.logits(hidden[-1:])[0].float()
    error = ((own - reference).norm() / reference.norm()).item()
    if not error <= (1e-3 if loaded.dtype is torch.float32 else 0.05):
        raise ModelLoadError(f"{loaded.architecture}: logits of the output head differ from the model's by {error:.3g}")
