"""The modules that sentence-transformers runs behind pooling, as one chain in float32.

Formulas: ``Dense`` y = activation(W x + b), plus x or R x where ``use_residual`` is set; ``LayerNorm``; ``Normalize``
x / max(|x|, 1e-12). Sources: ``config.json`` of each module's folder, weights beside it in ``model.safetensors`` or
``pytorch_model.bin``. What is missing, of another shape or not known refuses the model with the file's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from pyruntime.errors import ModelLoadError
from pyruntime.model.folder_files import optional_json, positive, read_json, read_weights, typed
from pyruntime.model.linear import linear

# Classes that sentence-transformers constructs without arguments; it trusts names below torch.nn alone.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda rows: rows,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}
DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"
SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One line of ``modules.json``: the class's own name, and where its files lie."""

    name: str
    folder: Path

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"


@dataclass(frozen=True, slots=True)
class Projection:
    """A chain of modules: ``steps`` takes float32 [n, in_features] to [n, out_features], each row by itself.

    ``in_features`` and ``out_features`` are None where no module of the chain says them; ``source`` said the former.
    ``normalizes``: a Normalize came last. It is not among the steps, since a request's ``normalize`` switches it.
    """

    steps: torch.nn.Sequential
    in_features: int | None
    out_features: int | None
    source: Path | None
    normalizes: bool = False


class Dense(torch.nn.Module):
    """y = activation(W x + b); plus x where ``adds_input``, or R x where there is a ``residual``. W and R [out, in]."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS["Identity"],
        adds_input: bool = False,
        residual: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.residual: torch.Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("residual", residual)
        self._activation = activation
        self._adds_input = adds_input

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # A vector must not depend on what shares its batch, and these layers are small beside the model's.
        out = self._activation(linear(rows, self.weight, self.bias, row_invariant=True))
        if self.residual is not None:
            return out + linear(rows, self.residual, None, row_invariant=True)
        return out + rows if self._adds_input else out


class _Normalize(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.normalize(rows, dim=-1, eps=1e-12)


def read_projection(entries: list[ModuleEntry], width: int | None, source: Path | None, level: str) -> Projection:
    """Dense, LayerNorm and Normalize modules in their order, each at ``level`` (sentence or token embeddings).

    ``width``: of the vectors that go in, as ``source`` says, or None. Raises ``ModelLoadError``.
    """
    steps: list[torch.nn.Module] = []
    first, first_source = width, source
    for entry in entries:
        config = optional_json(entry.config_file)
        _check_level(entry, config, level)
        if entry.name == "Normalize":
            steps.append(_Normalize())
            continue
        step, takes, gives = _READERS[entry.name](entry, config)
        if width is not None and takes != width:
            raise ModelLoadError(f"{entry.config_file}: takes vectors of {takes}, but {source} gives {width}")
        if first is None:
            first, first_source = takes, entry.config_file
        steps.append(step)
        width, source = gives, entry.config_file
    normalizes = bool(steps) and isinstance(steps[-1], _Normalize)
    while steps and isinstance(steps[-1], _Normalize):
        steps.pop()
    chain = torch.nn.Sequential(*steps).eval().requires_grad_(False)
    return Projection(chain, first, width, first_source, normalizes)


def _read_dense(entry: ModuleEntry, config: dict[str, Any]) -> tuple[torch.nn.Module, int, int]:
    file = entry.config_file
    takes, gives = positive(config, "in_features", file), positive(config, "out_features", file)
    activation = config.get("activation_function", DEFAULT_ACTIVATION)
    short = str(activation).rsplit(".", 1)[-1]
    if not str(activation).startswith("torch.nn.") or short not in ACTIVATIONS:
        raise ModelLoadError(f"{file}: activation_function {activation!r} is not served; served: {sorted(ACTIVATIONS)}")
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (gives, takes)}
    if typed(config, "bias", bool, file) is not False:
        shapes["linear.bias"] = (gives,)
    adds_input = bool(typed(config, "use_residual", bool, file))
    if adds_input and takes != gives:
        shapes["residual.weight"] = (gives, takes)
    weights = read_weights(entry.folder, shapes)
    dense = Dense(
        weights["linear.weight"],
        weights.get("linear.bias"),
        ACTIVATIONS[short],
        adds_input,
        weights.get("residual.weight"),
    )
    return dense, takes, gives


def _read_layer_norm(entry: ModuleEntry, config: dict[str, Any]) -> tuple[torch.nn.Module, int, int]:
    width = positive(config, "dimension", entry.config_file)
    weights = read_weights(entry.folder, {"norm.weight": (width,), "norm.bias": (width,)})
    norm = torch.nn.LayerNorm(width)
    norm.load_state_dict({key.removeprefix("norm."): value for key, value in weights.items()})
    return norm, width, width


_READERS: dict[str, Callable[[ModuleEntry, dict[str, Any]], tuple[torch.nn.Module, int, int]]] = {
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
}
CHAIN_MODULES = (*_READERS, "Normalize")
SERVED_MODULES = ("Transformer", "MLMTransformer", "Pooling", *CHAIN_MODULES, "SpladePooling", "MultiVectorMask")
# Modules of these packages are served by the class's name; any other would be code that comes with the model.
KNOWN_PACKAGES = ("sentence_transformers.", "pylate.")


def _check_level(entry: ModuleEntry, config: dict[str, Any], level: str) -> None:
    # A Dense that does not say is at the level of the chain it stands in; so are older Normalize folders.
    takes = config.get("module_input_name") or level
    gives = config.get("module_output_name") or takes
    if takes != level or gives != level:
        problem = f"reads {takes} and writes {gives}; served at its place: {level}"
        raise ModelLoadError(f"{entry.config_file}: {entry.name} {problem}")


def read_entries(folder: Path) -> list[ModuleEntry]:
    """``modules.json`` in its order. Raises ``ModelLoadError``."""
    file = folder / "modules.json"
    entries, modules = [], read_json(file)
    if not isinstance(modules, list):
        raise ModelLoadError(f"{file}: expected a list of modules")
    for module in modules:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelLoadError(f"{file}: {module!r} names no type and path of a module")
        if not kind.startswith(KNOWN_PACKAGES):
            raise ModelLoadError(f"{file}: module {kind} is code that comes with the model, which is not run")
        entries.append(ModuleEntry(kind.rsplit(".", 1)[-1], folder / path))
    return entries


def check_entries(folder: Path, entries: list[ModuleEntry]) -> None:
    """Refuse modules that are not served and a first one that is not the transformer, by name."""
    file = folder / "modules.json"
    unknown = [entry.name for entry in entries if entry.name not in SERVED_MODULES]
    if unknown:
        raise ModelLoadError(f"{file}: modules {unknown} are not served; served: {list(SERVED_MODULES)}")
    if not entries or entries[0].name not in ("Transformer", "MLMTransformer"):
        raise ModelLoadError(f"{file}: the first module is not Transformer")
    if entries[0].folder != folder:
        raise ModelLoadError(f"{file}: the transformer's files are in {entries[0].folder}; served: beside modules.json")
