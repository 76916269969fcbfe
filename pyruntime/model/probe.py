"""What a new body is: causal or reading ahead, and on which path its batches give what transformers alone gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from pyruntime.errors import ModelLoadError
from pyruntime.model.attention import AttentionContext, LayerTraits
from pyruntime.model.packed import run_packed
from pyruntime.model.padded import run_padded
from pyruntime.types import ForwardBatch

# Least cosine between a hidden row of a batch and an eager one. In bfloat16 eager rows themselves are off: of 521
# random tokens of Gemma 3 270M the worst is at 0.9925 of float32 (those of a batch, which rounds less often, at 0.996),
# and the two at 0.9785 of each other. A wrong mask, position or window costs far more.
LEAST_COSINE = {torch.float32: 0.99999, torch.bfloat16: 0.95, torch.float16: 0.99}
# How far, relatively, hidden rows move when a token behind them changes, before the model counts as reading ahead.
# Rounding moves them less: in a causal model not at all, unless another token sends experts other groups of rows.
READS_AHEAD = {torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True)
class BodyTraits:
    """``layers`` is empty where the padded path is taken. ``one_by_one``: even padding under a mask changes rows there,
    so no two texts may share a forward (convolutions over time, Fourier mixing)."""

    is_causal: bool
    layers: dict[int, LayerTraits] = field(default_factory=dict)
    one_by_one: bool = False


def probe_body(model: Any, device: str, offset: int, is_lm: bool) -> BodyTraits:
    """Packed where every layer allows it, padded for other encoders; ``ModelLoadError`` for all else.

    Leaves ``model`` with the attention implementation of its path. ``offset``: see ``run_packed``. ``is_lm``: it was
    asked for as a language model, which the padded path is not for.
    """
    body = model.base_model
    if getattr(body.config, "is_encoder_decoder", False) and hasattr(body, "decoder"):
        raise ModelLoadError("an encoder-decoder; its encoder half can be, saved as such (T5EncoderModel)")
    is_causal = not _reads_ahead(model, device)
    batch = _small_batch(device)
    try:
        return _packed_traits(model, batch, offset, is_causal)
    except ModelLoadError:
        if is_causal or is_lm:
            raise
    set_attention(model, "sdpa" if body._supports_sdpa else "eager")
    return BodyTraits(is_causal=False, one_by_one=not _hides_padding(model, batch))


def _packed_traits(model: Any, batch: ForwardBatch, offset: int, is_causal: bool) -> BodyTraits:
    """``is_causal``: what holds of layers that do not say themselves."""
    layers: dict[int, LayerTraits] = {}
    body = model.base_model
    context = AttentionContext(batch, probe=layers, causal=is_causal)
    try:
        rows = run_packed(body, batch, context, offset, None)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"a packed forward fails: {type(error).__name__}: {error}") from error
    expected = getattr(body.config, "num_hidden_layers", len(layers))
    if len(layers) != expected or not layers:
        raise ModelLoadError(f"{len(layers)} of {expected} layers go through the packed attention")
    kinds = {traits.is_causal for traits in layers.values()}
    if len(kinds) != 1:
        raise ModelLoadError("some of its layers are causal and some are two-sided")
    (is_causal,) = kinds
    # Of a causal model the self-check says more, with a cache and chunks; there is no other path for it anyway.
    if not is_causal and not _agrees(model, batch, rows):
        raise ModelLoadError("rows of a packed forward depend on the texts beside them")
    return BodyTraits(is_causal, layers)


def _small_batch(device: str) -> ForwardBatch:
    lengths = (9, 4)
    return ForwardBatch(
        rows=[],
        input_ids=torch.arange(3, 3 + sum(lengths), device=device),
        positions=torch.tensor([place for length in lengths for place in range(length)], device=device),
        query_starts=torch.tensor([0, 9, 13], dtype=torch.int32, device=device),
    )


def _hides_padding(model: Any, batch: ForwardBatch) -> bool:
    """Whether a text's rows are what they are alone when padded under a mask, to the bit whatever the padding is.

    The bits tell what a cosine would overlook in bfloat16.
    """
    padding = model.base_model.config.pad_token_id or 0
    rows, others = (
        run_padded(model.base_model, batch, None, id, one_by_one=False) for id in (padding, (padding + 5) % 8)
    )
    return torch.equal(rows, others) and _agrees(model, batch, rows)


@torch.inference_mode()
def _agrees(model: Any, batch: ForwardBatch, rows: torch.Tensor) -> bool:
    """Whether hidden rows [T, H] of a batch are those of each of its texts alone."""
    with eager_attention(model):
        alone = [
            model.base_model(input_ids=batch.input_ids[None, begin:end]).last_hidden_state[0]
            for begin, end in pairwise(batch.query_starts.tolist())
        ]
    cosine = torch.nn.functional.cosine_similarity(torch.cat(alone).double(), rows.double(), dim=-1).min().item()
    return cosine >= LEAST_COSINE[rows.dtype]


@torch.inference_mode()
def _reads_ahead(model: Any, device: str) -> bool:
    """Whether earlier hidden rows change with a later token: the mark of an encoder, whatever its classes say.

    Raises ``ModelLoadError`` when transformers' own eager forward fails.
    """
    texts = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 5, 6, 8]], device=device)
    try:
        with eager_attention(model):
            hidden = model.base_model(input_ids=texts, attention_mask=torch.ones_like(texts)).last_hidden_state[:, :4]
    except Exception as error:
        raise ModelLoadError(f"transformers' own forward fails: {type(error).__name__}: {error}") from error
    moved = (hidden[0].double() - hidden[1].double()).norm() / hidden[0].double().norm()
    return bool(moved > READS_AHEAD[hidden.dtype])


def set_attention(model: Any, implementation: str) -> None:
    """Every part of ``model`` attends, and makes its masks, by ``implementation``.

    ``PreTrainedModel.set_attn_implementation`` leaves models alone that do not attend through the interface, but those
    too ask ``masking_utils`` for their masks, and with ours they would get none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = implementation


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """transformers' own plain attention while the block runs, the one set before afterwards whatever happens."""
    before = model.config._attn_implementation
    set_attention(model, "eager")
    try:
        yield
    finally:
        set_attention(model, before)
