"""A folder, hub name or GGUF file → a transformers model ready for the packed forward, or a refusal with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from pyruntime.errors import ModelLoadError
from pyruntime.model.attention import AttentionContext, LayerTraits
from pyruntime.model.few_rows import use_few_rows_linears
from pyruntime.model.gguf import ensure_converted, is_gguf
from pyruntime.model.kv_cache import LayerShape
from pyruntime.model.output_head import OutputHead, output_head_of
from pyruntime.model.weights import CAUSAL_SUFFIXES, load_weights
from pyruntime.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``body`` gives hidden rows; ``output_head`` is None for encoders. ``model`` is what transformers loaded."""

    folder: Path
    config: Any
    model: Any
    body: Any
    output_head: OutputHead | None
    layers: dict[int, LayerTraits]
    is_causal: bool
    dtype: torch.dtype
    device: str
    position_offset: int
    takes_token_types: bool

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.body.get_input_embeddings().num_embeddings)

    @property
    def cache_shapes(self) -> dict[int, LayerShape]:
        """Key/value geometry of each layer, as its cache needs it."""
        return {index: traits.shape for index, traits in self.layers.items()}

    @property
    def max_positions(self) -> int:
        """Tokens that the position embeddings or the rotary training length allow."""
        limit = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        if not limit:
            raise ModelLoadError(f"{self.folder}: the config names no max_position_embeddings")
        return int(limit) - self.position_offset


def resolve_folder(path: str, progress: Callable[[str], None]) -> Path:
    """Local folder as it is; a ``.gguf`` file is converted once and cached; anything else is a hub name."""
    if is_gguf(path):
        return Path(ensure_converted(Path(path), progress))
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists() or path.startswith((".", "/", "~")):
        raise ModelLoadError(f"{path}: neither a model folder nor a .gguf file")
    from huggingface_hub import snapshot_download

    progress(f"fetching {path} from the hub")
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:
        raise ModelLoadError(f"{path}: not a folder, and the hub has it not: {error}") from error


def load_model(folder: Path, dtype: str, device: str, deterministic: bool = False) -> LoadedModel:
    """``dtype``: auto (the checkpoint's; float16 becomes float32 on a CPU), float32 or bfloat16.

    ``deterministic``: a row's result does not depend on what else is in the batch, at the cost of
    slower linears for many rows.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise ModelLoadError(f"{folder}: config.json: {error}") from error
    architecture = (config.architectures or ["unnamed"])[0]
    try:
        model = load_weights(folder, architecture, _torch_dtype(dtype, config, device))
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{folder}: {architecture}: {type(error).__name__}: {error}") from error
    model = model.to(device).eval().requires_grad_(False)
    use_few_rows_linears(model, deterministic)
    is_lm = type(model).__name__.endswith(CAUSAL_SUFFIXES)
    body = model.base_model
    offset = _position_offset(body)
    layers = _probe(body, device, offset)
    causal = {traits.is_causal for traits in layers.values()}
    if len(causal) != 1:
        problem = f"{len(causal)} kinds of attention among {len(layers)} packed layers; one is served"
        raise ModelLoadError(f"{folder}: {problem}")
    return LoadedModel(
        folder=folder,
        config=model.config,
        model=model,
        body=body,
        output_head=output_head_of(model, model.config, deterministic) if is_lm and causal == {True} else None,
        layers=layers,
        is_causal=causal == {True},
        dtype=next(body.parameters()).dtype,
        device=device,
        position_offset=offset,
        takes_token_types=_takes_token_types(body),
    )


def _torch_dtype(name: str, config: Any, device: str) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    stored = getattr(config, "dtype", None) or torch.float32
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    return torch.float32 if stored is torch.float16 and device == "cpu" else stored


def _position_offset(body: Any) -> int:
    """RoBERTa's positions start at padding_idx + 1; its position table says so by having a padding index."""
    table = getattr(getattr(body, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1


def _takes_token_types(body: Any) -> bool:
    has_types = (getattr(body.config, "type_vocab_size", 0) or 0) > 0
    return has_types and "token_type_ids" in inspect.signature(body.forward).parameters


def _probe(body: Any, device: str, offset: int) -> dict[int, LayerTraits]:
    """One small forward that records what every layer asks of attention and refuses what is unknown."""
    layers: dict[int, LayerTraits] = {}
    batch = ForwardBatch(
        rows=[],
        input_ids=torch.ones(5, dtype=torch.int64, device=device),
        positions=torch.tensor([0, 1, 2, 0, 1], device=device),
        query_starts=torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
    )
    run_body(body, batch, AttentionContext(batch, probe=layers), offset, token_types=None)
    expected = getattr(body.config, "num_hidden_layers", len(layers))
    if len(layers) != expected:
        raise ModelLoadError(
            f"{type(body).__name__}: {len(layers)} of {expected} layers went through the packed attention; "
            "this architecture is not served"
        )
    return layers


@torch.inference_mode()
def run_body(
    body: Any,
    batch: ForwardBatch,
    context: AttentionContext,
    position_offset: int,
    token_types: torch.Tensor | None,
) -> torch.Tensor:
    """The one place that calls a transformers body: packed ids [T] → last hidden rows [T, H]."""
    keywords: dict[str, Any] = {"attention_context": context}
    if token_types is not None:
        keywords["token_type_ids"] = token_types.unsqueeze(0)
    positions = batch.positions + position_offset if position_offset else batch.positions
    output = body(
        input_ids=batch.input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keywords
    )
    return output.last_hidden_state[0]
