"""Before a model is served: its output in a batch is compared with transformers' eager output, text by text."""

from __future__ import annotations

import random

import torch

from pyruntime.errors import ModelLoadError
from pyruntime.model.classifier_check import check_classifier
from pyruntime.model.loader import LoadedModel
from pyruntime.model.probe import LEAST_COSINE, eager_attention
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import Task

CHUNK_TOKENS = 96
# Both sides are quantised (what that costs was looked at before), but what differs by a rounding may take another step
# of its int8, which is a hundred roundings wide. Of 521 random tokens of Gemma 3 270M in bfloat16 single rows then come
# out at 0.71 of each other, though both are at 0.91 and 0.92 or better of plain float32. A wrong mask, position or
# window spoils rows that lie together, so neighbours are judged together; there the least mean is 0.92. Most models are
# far steadier, and are held to what they are: SPREAD times the distance that roundings of the embeddings alone make.
LEAST_INT8_COSINE = 0.85
STEADY_INT8_COSINE = {torch.float32: 0.999, torch.float16: 0.99, torch.bfloat16: 0.98}
SPREAD = 4
NEIGHBOURS = 8


def self_check(runner: ModelRunner, scheduler: Scheduler, builder: BatchBuilder) -> float:
    """Least cosine over all rows, or ``ModelLoadError``.

    Covers mixed lengths, padding between them, chunks, pages, the window, and a padding token within a text.
    """
    loaded = runner.loaded
    texts = _texts(loaded)
    token_types = [_token_types(ids) for ids in texts] if loaded.takes_token_types else None
    batched = run_batched(runner, scheduler, builder, texts, token_types)
    eager = _run_eager(loaded, texts)
    least, allowed = 1.0, _allowed(loaded, texts, eager)
    for ids, own, reference in zip(texts, batched, eager, strict=True):
        cosine = _least_cosine(loaded, own, reference)
        least = min(least, cosine)
        if not cosine >= allowed:
            raise ModelLoadError(
                f"{loaded.architecture}: on a text of {len(ids)} tokens the {loaded.execution_path.value} forward "
                "differs from eager transformers "
                f"(least cosine of a row {cosine:.4f}, allowed {allowed})"
            )
    with eager_attention(loaded.model):
        check_classifier(loaded.classifier, loaded.model, texts)
    _check_logits(loaded, eager[1], texts[1])  # a short text: eager logits of every row are large
    return least


def _least_cosine(loaded: LoadedModel, own: torch.Tensor, reference: torch.Tensor) -> float:
    """Of rows [L, H] of a text; of int8, of the means over neighbours."""
    cosines = torch.nn.functional.cosine_similarity(own.double(), reference.double(), dim=-1)
    if loaded.quantization == "int8":
        cosines = cosines.unfold(0, min(NEIGHBOURS, len(own)), 1).mean(-1)
    return cosines.min().item()


def _allowed(loaded: LoadedModel, texts: list[list[int]], eager: list[torch.Tensor]) -> float:
    """Least cosine at which rows count as the same."""
    if loaded.quantization != "int8":
        return LEAST_COSINE[loaded.dtype]
    generator = torch.Generator().manual_seed(0)

    def rounded(_module: torch.nn.Module, _inputs: object, rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + torch.finfo(rows.dtype).eps * torch.randn(rows.shape, generator=generator)).to(rows.dtype)

    hook = loaded.body.get_input_embeddings().register_forward_hook(rounded)
    try:
        moved = _run_eager(loaded, texts)
    finally:
        hook.remove()
    steady = min(_least_cosine(loaded, *pair) for pair in zip(moved, eager, strict=True))
    return min(STEADY_INT8_COSINE[loaded.dtype], max(LEAST_INT8_COSINE, 1 - SPREAD * (1 - steady)))


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
    # 1, 17 and 20 are near enough that a padded forward takes them together.
    lengths = [min(length, loaded.max_positions) for length in (1, 17, 20, longest)]
    texts = [[generator.randrange(3, loaded.vocab_size) for _ in range(length)] for length in lengths]
    padding = getattr(loaded.config, "pad_token_id", None)
    if not loaded.is_causal and padding is not None and 0 <= padding < loaded.vocab_size:
        texts[2][len(texts[2]) // 2] = padding
    return texts


def _token_types(ids: list[int]) -> list[int]:
    return [int(2 * place >= len(ids)) for place in range(len(ids))]


def run_batched(
    runner: ModelRunner,
    scheduler: Scheduler,
    builder: BatchBuilder,
    texts: list[list[int]],
    token_types: list[list[int]] | None = None,
) -> list[torch.Tensor]:
    """Hidden rows [L, H] of each text, all of them scheduled, chunked and batched as in serving."""
    sequences = [Sequence(Task.EMBED, list(ids)) for ids in texts]
    for sequence, types in zip(sequences, token_types or [], strict=False):
        sequence.token_type_ids = types
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


@torch.inference_mode()
def _run_eager(loaded: LoadedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    with eager_attention(loaded.model):
        return [_eager_rows(loaded, ids) for ids in texts]


def _eager_rows(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    inputs = {"input_ids": ids, "attention_mask": [1] * len(ids)}
    if loaded.takes_token_types:
        inputs["token_type_ids"] = _token_types(ids)
    tensors = {name: torch.tensor([values], device=loaded.device) for name, values in inputs.items()}
    rows: torch.Tensor = loaded.body(**tensors).last_hidden_state[0]
    return rows


@torch.inference_mode()
def _check_logits(loaded: LoadedModel, hidden: torch.Tensor, ids: list[int]) -> None:
    """The output head's scale and softcap against the model's own logits."""
    if loaded.output_head is None:
        return
    with eager_attention(loaded.model):
        reference = loaded.model(input_ids=torch.tensor([ids], device=loaded.device)).logits[0, -1].float()
    own = loaded.output_head.logits(hidden[-1:])[0].float()
    error = ((own - reference).norm() / reference.norm()).item()
    if not error <= (1e-3 if loaded.dtype is torch.float32 and loaded.quantization == "none" else 0.05):
        raise ModelLoadError(f"{loaded.architecture}: logits of the output head differ from the model's by {error:.3g}")
