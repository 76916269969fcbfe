"""A folder, hub name or GGUF file → a transformers model ready for the packed forward, or a refusal with the reason."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from pyruntime.errors import ModelLoadError
from pyruntime.model.attention import IMPLEMENTATION, LayerTraits
from pyruntime.model.classifier import Classifier, classifier_of
from pyruntime.model.encoder_layers import fuse_encoder_layers
from pyruntime.model.fused_layers import fuse_layers
from pyruntime.model.fusion import fuse
from pyruntime.model.gguf import ensure_converted, is_gguf
from pyruntime.model.kv_cache import LayerShape
from pyruntime.model.limits import max_positions
from pyruntime.model.linear import use_own_linears
from pyruntime.model.output_head import OutputHead, output_head_of
from pyruntime.model.probe import probe_body
from pyruntime.model.quantized import quantize
from pyruntime.model.weights import CAUSAL_SUFFIXES, load_weights, refuse_adapter
from pyruntime.types import ExecutionPath

# What may be read of a hub repository: "*" passes folders too. Beside safetensors, modules of sentence-transformers
# and the heads of BGE-M3 come as pickles, of which only tensors are read.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*/pytorch_model.bin", "*_linear.pt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``body`` gives hidden rows; ``output_head`` is None for encoders. ``model`` is what transformers loaded.

    ``layers`` is empty for models that run padded, ``one_by_one`` no two texts in one forward.
    """

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
    classifier: Classifier | None = None
    one_by_one: bool = False
    quantization: str = "none"

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.body.get_input_embeddings().weight.shape[0])

    @property
    def cache_shapes(self) -> dict[int, LayerShape]:
        """Key/value geometry of each layer, as its cache needs it."""
        return {index: traits.shape for index, traits in self.layers.items()}

    @property
    def execution_path(self) -> ExecutionPath:
        return ExecutionPath.PACKED if self.layers else ExecutionPath.PADDED

    @property
    def max_positions(self) -> int:
        """Tokens that the position embeddings or the rotary training length allow."""
        return max_positions(self.config, self.folder, self.position_offset)


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
        folder = Path(snapshot_download(path, allow_patterns=list(HUB_FILES)))
        if not any(folder.glob("*.safetensors")):  # an older repository; newer ones often hold both forms
            folder = Path(snapshot_download(path, allow_patterns=[*HUB_FILES, "pytorch_model*.bin"]))
        return folder
    except Exception as error:
        raise ModelLoadError(f"{path}: not a folder, and the hub has it not: {error}") from error


def load_model(
    folder: Path, dtype: str, device: str, deterministic: bool = False, quantization: str = "none"
) -> LoadedModel:
    """``dtype``: auto (the checkpoint's; float16 becomes float32 on a CPU), float32 or bfloat16.

    ``deterministic``: on a CPU, a row's result does not depend on what else is in the batch, at the cost of
    slower linears for many rows. ``quantization``: none, or int8 for the linears of a model on a CPU, all else in
    ``dtype``.
    """
    refuse_adapter(folder)
    if quantization != "none" and device != "cpu":
        raise ModelLoadError(f"{folder}: quantization {quantization} is for device cpu, not {device}")
    if deterministic and device != "cpu":  # there torch's products choose the order of their sums by the number of rows
        raise ModelLoadError(f"{folder}: deterministic is for device cpu, not {device}")
    config = _config(folder)
    architecture = (config.architectures or ["unnamed"])[0]
    try:
        model = load_weights(folder, architecture, _torch_dtype(dtype, config, device))
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{folder}: {architecture}: {_problem(error)}") from error
    model = model.to(device).eval().requires_grad_(False)
    use_own_linears(model, deterministic)
    fuse(model)
    is_lm = type(model).__name__.endswith(CAUSAL_SUFFIXES)
    body = model.base_model
    offset = _position_offset(body)
    try:
        _check_embeddings(body)
        traits = probe_body(model, device, offset, is_lm)
        if quantization == "int8":
            quantize(model, offset)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {architecture} is not served: {error}") from error
    if traits.is_causal and traits.layers:
        fuse_layers(model, {index: layer.shape for index, layer in traits.layers.items()}, offset)
    elif traits.layers:
        fuse_encoder_layers(model, offset)
    return LoadedModel(
        folder=folder,
        config=model.config,
        model=model,
        body=body,
        output_head=(
            output_head_of(model, model.config, deterministic, quantization == "int8")
            if is_lm and traits.is_causal
            else None
        ),
        layers=traits.layers,
        is_causal=traits.is_causal,
        dtype=next(body.parameters()).dtype,
        device=device,
        position_offset=offset,
        takes_token_types=_takes_token_types(body),
        classifier=classifier_of(folder, model, is_causal=traits.is_causal),
        one_by_one=deterministic or traits.one_by_one,
        quantization=quantization,
    )


def _config(folder: Path) -> Any:
    file = folder / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{file}: not an object")
    model_type, remote = fields.get("model_type"), fields.get("auto_map")
    if remote and model_type not in CONFIG_MAPPING:
        problem = f"model_type {model_type!r} is not one of transformers' own; it requires remote code"
        raise ModelLoadError(f"{file}: {problem} (auto_map {remote}), which is never run")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"{file}: {error}") from error


def _problem(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        return "its attention classes are its own, outside transformers' attention interface; not served"
    return f"{type(error).__name__}: {error}"


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


def _check_embeddings(body: Any) -> None:
    try:
        body.get_input_embeddings().weight.shape[0]
    except (NotImplementedError, AttributeError) as error:
        raise ModelLoadError("it has no table of input embeddings, so token ids have no range") from error


def _takes_token_types(body: Any) -> bool:
    has_types = (getattr(body.config, "type_vocab_size", 0) or 0) > 1
    return has_types and "token_type_ids" in inspect.signature(body.forward).parameters
