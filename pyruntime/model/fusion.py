"""Modules of a body that several small torch functions make up, each replaced by one compiled op.

What a module computes is found out by trying: the op stands in for it where both agree on random rows of many sizes,
and nowhere else. It does so in packed forwards alone, so that the self-check at load compares it with transformers'
own code.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pyruntime.model.attention import is_attending
from pyruntime.model.linear import OwnLinear
from pyruntime.ops import between
from pyruntime.ops.linear import ACTIVATIONS

Forward = Callable[..., torch.Tensor]

# Largest difference of a random row, relative to its largest value, at which both count as the same: a few roundings.
AGREE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# (standard deviation, mean) of the rows that a module is tried on. Small ones show the constant of a norm, a mean that
# it is taken away, large ones where values are cut off.
ROWS = ((1.0, 0.0), (1.0, 2.0), (1e-3, 0.0), (0.1, -1.0), (100.0, 0.0))
# Names under which bodies keep the small constant of their norms, and linear, activation and the linear behind it.
EPSILONS = ("eps", "variance_epsilon", "epsilon")
ACTIVATED = (
    ("dense", "intermediate_act_fn", None),
    ("fc1", "activation_fn", "fc2"),
    ("dense_h_to_4h", "act", "dense_4h_to_h"),
    ("lin1", "activation", "lin2"),
)


@torch.inference_mode()
def fuse(model: torch.nn.Module) -> int:
    """Replaces what it can in the body of a model on a CPU; returns how many modules."""
    body: Any = getattr(model, "base_model", model)
    if next(body.parameters()).device.type != "cpu":
        return 0
    _fuse_rotary(sys.modules[type(body).__module__])
    return sum(_fuse_module(module) for module in list(body.modules()))


def _fuse_module(module: torch.nn.Module) -> bool:
    inputs, candidates = _candidates(module)
    if not candidates:
        return False
    kind, num_inputs, dtype = type(module), len(inputs), inputs[0].dtype
    try:
        expected = kind.forward(module, *inputs)
        tried = [(difference(candidate(module, *inputs), expected), candidate) for candidate in candidates]
    except Exception:  # it takes other arguments or parameters: whatever it is, it is not what it looks like
        return False
    error, best = min(tried, key=lambda pair: pair[0])
    if not error <= AGREE[dtype]:
        return False

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_as_tried = len(args) == num_inputs and not kwargs and args[0].dtype is dtype
        return (best if is_as_tried and is_attending() else kind.forward)(self, *args, **kwargs)

    put_forward(module, forward, fused=best)
    return True


def put_forward(module: torch.nn.Module, forward: Forward, **attributes: Any) -> None:
    """The class and not the object, so that whoever puts a forward on the object for a while gets this one back."""
    kind = type(module)
    own = {"forward": functools.wraps(kind.forward)(forward), "__module__": kind.__module__, **attributes}
    module.__class__ = type(kind.__name__, (kind,), own)


@contextlib.contextmanager
def noting_calls(modules: Iterable[torch.nn.Module], note: Callable[[Any, Any, Any, Any], None]) -> Iterator[None]:
    """``note(module, args, kwargs, output)`` after each call of one of ``modules`` within."""
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def difference(own: torch.Tensor, expected: Any) -> float:
    """Of the row that differs most, relative to its largest value; NaN and another kind of answer count as large."""
    if not isinstance(expected, torch.Tensor) or (own.shape, own.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    wanted = expected.float()
    error = ((own.float() - wanted).abs().amax(-1) / wanted.abs().amax(-1)).amax().item()
    return error if error == error else float("inf")


def _candidates(module: torch.nn.Module) -> tuple[tuple[torch.Tensor, ...], list[Forward]]:
    """Rows to try a module on, and what it may be by the looks of it; none for most."""
    for recognise in (_as_norm, _as_gated, _as_activated, _as_added_norm):
        found = recognise(module)
        if found is not None:
            return found
    return (), []


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rows(width: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """[1, R, W], one for each of ``ROWS``."""
    scales, means = torch.tensor(ROWS)[:, :, None].unbind(1)
    return (_random(1, len(ROWS), width, seed=seed) * scales + means).to(like.dtype)


def _as_norm(module: Any) -> tuple[tuple[torch.Tensor, ...], list[Forward]] | None:
    parameters = dict(module.named_parameters())
    epsilon = next((getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if epsilon is None or list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return None
    weight = parameters["weight"]
    own: list[Forward] = [functools.partial(_norm, epsilon=epsilon, offset=offset) for offset in (0.0, 1.0)]
    return (_rows(weight.shape[0], like=weight),), own


def _norm(module: Any, x: torch.Tensor, *, epsilon: float, offset: float) -> torch.Tensor:
    """x [..., W]. Heads [1, heads, T, W] that are a view of [1, T, heads, W] stay one."""
    turned = x.dim() == 4 and not x.is_contiguous()
    dense = (x.transpose(1, 2) if turned else x).contiguous()
    y = between.rms_norm(dense.view(-1, dense.shape[-1]), module.weight, epsilon, offset).view(dense.shape)
    return y.transpose(1, 2) if turned else y


def name_of(activation: Any) -> str | None:
    """Which of ``ACTIVATIONS`` a module or function is."""
    x = torch.cat([torch.linspace(-6, 6, 101), torch.linspace(-120, 120, 41)])  # some are cut off far from zero
    try:
        y = activation(x)
    except Exception:
        return None
    names = [name for name, own in ACTIVATIONS.items() if name != "none" and torch.allclose(own(x), y, atol=1e-6)]
    return names[0] if names else None


def _as_gated(module: Any) -> tuple[tuple[torch.Tensor, ...], list[Forward]] | None:
    """down(act(gate(x)) * up(x)), gate and up two linears or the halves of one."""
    children = {name: child for name, child in module.named_children() if isinstance(child, OwnLinear)}
    merged = "gate_up_proj" in children
    if not (merged or {"gate_proj", "up_proj"} <= children.keys()) or "down_proj" not in children:
        return None
    gate = children["gate_up_proj" if merged else "gate_proj"]
    name = name_of(getattr(module, "act_fn", getattr(module, "activation_fn", None)))
    if name is None or gate.bias is not None or (not merged and module.up_proj.bias is not None):
        return None
    own: list[Forward] = [functools.partial(_gated, activation=name, merged=merged)]
    return (_rows(gate.in_features, like=gate.weight),), own


def _gated(module: Any, x: torch.Tensor, *, activation: str, merged: bool) -> torch.Tensor:
    if merged:
        passed = module.gate_up_proj.gated_halves(x, activation)
    else:
        passed = module.gate_proj.product(x, activation, module.up_proj)
    hidden: torch.Tensor = module.down_proj(passed)
    return hidden


def _as_activated(module: Any) -> tuple[tuple[torch.Tensor, ...], list[Forward]] | None:
    """second(act(first(x))), or act(first(x)) where a module ends there."""
    for first, act, second in ACTIVATED:
        parts = [getattr(module, name, None) for name in (first, second) if name]
        if not all(isinstance(part, OwnLinear) for part in parts):
            continue
        name = name_of(getattr(module, act, None))
        if name is not None:
            weight = parts[0].weight  # type: ignore[union-attr]
            own = functools.partial(_activated, first=first, second=second, activation=name)
            return (_rows(weight.shape[1], like=weight),), [own]
    return None


def _activated(module: Any, x: torch.Tensor, *, first: str, second: str | None, activation: str) -> torch.Tensor:
    hidden: torch.Tensor = getattr(module, first).product(x, activation)
    return getattr(module, second)(hidden) if second else hidden


def _as_added_norm(module: Any) -> tuple[tuple[torch.Tensor, ...], list[Forward]] | None:
    """BERT's ends of a block: LayerNorm(dense(x) + what went in)."""
    dense, norm = getattr(module, "dense", None), getattr(module, "LayerNorm", None)
    if not isinstance(dense, OwnLinear) or type(norm) is not torch.nn.LayerNorm or len(norm.normalized_shape) != 1:
        return None
    inputs = (
        _rows(dense.in_features, like=dense.weight),
        _rows(dense.out_features, like=dense.weight, seed=1),
    )
    return inputs, [_added_norm]


def _added_norm(module: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    x, norm = module.dense(hidden_states), module.LayerNorm
    width = x.shape[-1]
    y = between.layer_norm(x.view(-1, width), input_tensor.reshape(-1, width), norm.weight, norm.bias, norm.eps)
    return y.view(x.shape)


def _fuse_rotary(modeling: Any) -> None:
    """transformers keeps the rotation of queries and keys as a function of each modeling module."""
    original = getattr(modeling, "apply_rotary_pos_emb", None)
    if original is None or getattr(original, "is_fused", False):
        return

    @functools.wraps(original)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_attending() or not _is_rotatable(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    if _rotates_halves(original):
        rotate.is_fused = True  # type: ignore[attr-defined]
        modeling.apply_rotary_pos_emb = rotate


def _is_rotatable(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Heads [1, heads, T, W] with angles [1, T, W] of the same dtype, on a CPU, all of them dense in W."""
    if cos.device.type != "cpu" or cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] != 1:
        return False
    if cos.stride() != sin.stride() or cos.dtype is not sin.dtype:
        return False
    return all(
        each.dim() == 4 and each.shape[0] == 1 and each.shape[2:] == cos.shape[1:] and each.dtype == cos.dtype
        for each in (q, k)
    ) and all(each.stride(-1) == 1 for each in (q, k, cos))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return between.rotate_halves(x[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1).unsqueeze(0)


def _rotates_halves(original: Callable[..., Any]) -> bool:
    shapes = ((2, 3, 8), (1, 3, 8), (3, 8), (3, 8))
    q, k, cos, sin = (_random(1, *shape, seed=seed) for seed, shape in enumerate(shapes))
    try:
        expected = original(q, k, cos, sin)
        own = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return all(difference(*pair) <= AGREE[torch.float32] for pair in zip(own, expected, strict=True))
    except Exception:  # another signature, another answer
        return False
