"""Loads the compiled module, which registers ``torch.ops.pyruntime.*``, and tells torch the shapes of its answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import torch  # first: the extension resolves its symbols from the libraries that torch has loaded

try:
    from pyruntime import _C
except ImportError as error:
    raise ImportError(
        f"the compiled module pyruntime._C cannot be loaded ({error}); build it with `make install` or "
        "`pip install --no-build-isolation -e .`"
    ) from error

if torch.version.cuda is not None and _C.build_info()["cuda"]:
    torch.ops.load_library(str(Path(_C.__file__).with_name("_C_cuda.so")))


def build_info() -> dict[str, object]:
    """Facts about the build: version, cuda, compiler, torch_version (built against), cpu_capability (chosen here)."""
    return dict(_C.build_info())


# The fakes see the sizes, dtypes and devices of their arguments. They refuse what the kernels refuse of those by shape,
# in the same words: a program that traces would otherwise fail only when it runs.
Size = int | torch.SymInt | None  # None fits any


def _check(tensor: torch.Tensor | None, name: str, *shape: Size) -> None:
    """Raises RuntimeError unless the tensor, where there is one, has this shape."""
    if tensor is None:
        return
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    message = f"{name}: expected shape [{wanted}], got {list(tensor.shape)}"
    torch._check(tensor.dim() == len(shape), lambda: message)
    for have, size in zip(tensor.shape, shape, strict=True):
        if size is not None:
            torch._check(have == size, lambda: message)


def _fake(name: str) -> Callable[[Callable[..., object]], None]:
    """Registers a fake that refuses tensors of mixed devices.

    One meta tensor among real ones is enough for torch to call the fake, whose uninitialised answer would pass for a
    real one. Under FakeTensorMode the tensors say which device they stand for, and that is what is compared.
    """

    def register(function: Callable[..., object]) -> None:
        parameters = list(inspect.signature(function).parameters)

        def checked(*arguments: object, **keywords: object) -> object:
            named = [*zip(parameters, arguments, strict=False), *keywords.items()]
            tensors = [(key, value) for key, value in named if isinstance(value, torch.Tensor)]
            first, expected = tensors[0]
            for key, tensor in tensors:
                torch._check(
                    tensor.device.type == expected.device.type,
                    lambda key=key, tensor=tensor: (
                        f"{key}: expected a tensor on the device of {first}, {expected.device.type}, "
                        f"got one on {tensor.device.type}"
                    ),
                )
            return function(*arguments, **keywords)

        torch.library.register_fake(f"pyruntime::{name}", checked)

    return register


def _check_heads(q: torch.Tensor, k: torch.Tensor, k_name: str) -> None:
    heads, key_heads = q.shape[1], k.shape[-2]
    torch._check(
        key_heads >= 1 and heads % key_heads == 0,
        lambda: f"q: {heads} heads is not a multiple of {k_name}'s {key_heads}",
    )


@_fake("packed_attention")
def _(q, k, v, starts, causal, scale, window_left, window_right, softcap, sinks):  # type: ignore[no-untyped-def]
    _check(q, "q", None, None, None)
    _check(k, "k", q.shape[0], None, q.shape[2])
    _check(v, "v", q.shape[0], k.shape[1], None)
    _check_heads(q, k, "k")
    _check(starts, "starts", None)
    _check(sinks, "sinks", q.shape[1])
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@_fake("paged_attention")
def _(q, k_cache, v_cache, query_starts, kv_lengths, block_tables, causal, scale, window_left, softcap, sinks):  # type: ignore[no-untyped-def]
    _check(q, "q", None, None, None)
    _check(k_cache, "k_cache", None, None, None, q.shape[2])
    _check(v_cache, "v_cache", *k_cache.shape[:3], None)
    _check_heads(q, k_cache, "k_cache")
    _check(query_starts, "query_starts", None)
    _check(kv_lengths, "kv_lengths", query_starts.shape[0] - 1)
    _check(block_tables, "block_tables", query_starts.shape[0] - 1, None)
    _check(sinks, "sinks", q.shape[1])
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))


@_fake("store_kv")
def _(k, v, slot_mapping, k_cache, v_cache):  # type: ignore[no-untyped-def]
    _check(k_cache, "k_cache", None, None, None, None)
    _check(v_cache, "v_cache", *k_cache.shape[:2], None, None)
    _check(slot_mapping, "slot_mapping", None)
    _check(k, "k", slot_mapping.shape[0], *k_cache.shape[2:])
    _check(v, "v", slot_mapping.shape[0], *v_cache.shape[2:])


@_fake("copy_blocks")
def _(k_cache, v_cache, pairs):  # type: ignore[no-untyped-def]
    _check(k_cache, "k_cache", None, None, None, None)
    _check(v_cache, "v_cache", *k_cache.shape[:2], None, None)
    _check(pairs, "pairs", None, 2)


@_fake("pool")
def _(hidden, starts, kinds, dimensions, normalize, rows=None):  # type: ignore[no-untyped-def]
    _check(hidden, "hidden", None, None)
    _check(starts, "starts", None)
    sequences = starts.shape[0] - 1
    names = {"kinds": kinds, "dimensions": dimensions, "normalize": normalize, "rows": rows}
    for name, tensor in names.items():
        _check(tensor, name, sequences)
    return hidden.new_empty((sequences, hidden.shape[1]), dtype=torch.float32)


def _check_product(x, x_name, weight, bias, weight_name="weight") -> None:  # type: ignore[no-untyped-def]
    _check(x, x_name, None, None)
    _check(weight, weight_name, None, x.shape[1])
    _check(bias, "bias", weight.shape[0])


@_fake("pool_sparse")
def _(hidden, starts, weight, bias=None):  # type: ignore[no-untyped-def]
    _check_product(hidden, "hidden", weight, bias)
    _check(starts, "starts", None)
    return hidden.new_empty((starts.shape[0] - 1, weight.shape[0]), dtype=torch.float32)


@_fake("lexical_weights")
def _(hidden, starts, token_ids, weight, bias, skip):  # type: ignore[no-untyped-def]
    _check(hidden, "hidden", None, None)
    _check(starts, "starts", None)
    _check(token_ids, "token_ids", hidden.shape[0])
    _check(weight, "weight", hidden.shape[1])
    _check(skip, "skip", None)
    return torch.empty_like(token_ids), weight.new_empty(token_ids.shape, dtype=torch.float32), torch.empty_like(starts)


@_fake("delimiter_rows")
def _(input_ids, starts, delimiter):  # type: ignore[no-untyped-def]
    _check(input_ids, "input_ids", None)
    _check(starts, "starts", None)
    return torch.empty_like(input_ids), torch.empty_like(starts)


def _labels(rows, weight, bias, label_ids, label_starts):  # type: ignore[no-untyped-def]
    _check_product(rows, "rows", weight, bias)
    _check(label_ids, "label_ids", None)
    _check(label_starts, "label_starts", rows.shape[0] + 1)
    return rows.new_empty((label_ids.shape[0],), dtype=torch.float32)


@_fake("label_logits")
def _(rows, weight, bias, label_ids, label_starts):  # type: ignore[no-untyped-def]
    return _labels(rows, weight, bias, label_ids, label_starts)


@_fake("label_scores")
def _(rows, weight, bias, label_ids, label_starts, temperature, *, softcap=0.0, scale=1.0):  # type: ignore[no-untyped-def]
    out = _labels(rows, weight, bias, label_ids, label_starts)
    _check(temperature, "temperature", rows.shape[0])
    return out


@_fake("label_probabilities")
def _(rows, weight, bias, label_ids, label_starts, *, softcap=0.0, scale=1.0):  # type: ignore[no-untyped-def]
    return _labels(rows, weight, bias, label_ids, label_starts)


@_fake("token_logprobs")
def _(rows, weight, bias, token_ids, *, softcap=0.0, scale=1.0):  # type: ignore[no-untyped-def]
    _check_product(rows, "rows", weight, bias)
    _check(token_ids, "token_ids", rows.shape[0])
    return rows.new_empty((rows.shape[0],), dtype=torch.float32)


@_fake("logsumexp")
def _(rows, weight, bias, softcap, scale):  # type: ignore[no-untyped-def]
    _check_product(rows, "rows", weight, bias)
    return rows.new_empty((rows.shape[0],), dtype=torch.float32)


@_fake("sample")
def _(logits, temperature, top_k, top_p, min_p, seeds, positions, indices, *, top_logprobs=-1, **extras):  # type: ignore[no-untyped-def]
    _check(logits, "logits", None, None)
    batch, listed = logits.shape[0], max(0, top_logprobs)
    names = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seeds": seeds,
             "positions": positions, "indices": indices}  # fmt: skip
    names |= {name: extras.get(name) for name in ("repetition", "frequency", "presence")}
    for name, tensor in names.items():
        _check(tensor, name, batch)
    for name in ("seen_starts", "bias_starts"):
        _check(extras.get(name), name, batch + 1)
    _check(extras.get("bitmask"), "bitmask", batch, (logits.shape[1] + 31) // 32)
    ids = logits.new_empty((batch,), dtype=torch.int64)
    logprobs = logits.new_empty((batch if top_logprobs >= 0 else 0,), dtype=torch.float32)
    top_ids = logits.new_empty((batch, listed), dtype=torch.int64)
    return ids, logprobs, top_ids, logits.new_empty((batch, listed), dtype=torch.float32)


def _check_panels(x, w, columns, bias):  # type: ignore[no-untyped-def]
    per = 4 // x.element_size()
    _check(x, "x", None, None)
    _check(w, "w", columns // 16, (x.shape[1] + per - 1) // per, 16, per)
    _check(bias, "bias", columns)


def _linear(x, w, bias, up=None, activation=0):  # type: ignore[no-untyped-def]
    columns = w.shape[0] * 16 if w.dim() == 4 else w.shape[0]
    if w.dim() == 4:
        _check_panels(x, w, columns, bias)
    else:
        _check_product(x, "x", w, bias, "w")
    _check(up, "up", *w.shape)
    return x.new_empty((x.shape[0], columns))


for _name in ("linear_rows", "linear_panels"):
    _fake(_name)(_linear)


@_fake("linear_into")
def _(x, w, bias, by_panels, out):  # type: ignore[no-untyped-def]
    _check(out, "out", *_linear(x, w, bias).shape)


def _check_int8(x, w, columns, bias, up=None):  # type: ignore[no-untyped-def]
    _check(x, "x", None, None)
    for name, matrix in (("w", w), ("up", up)):
        _check(matrix, name, (columns + 15) // 16, 64 * ((x.shape[1] + 3) // 4 + (x.shape[1] + 127) // 128))
    _check(bias, "bias", columns)


@_fake("linear_int8")
def _(x, w, columns, bias=None, up=None, activation=0):  # type: ignore[no-untyped-def]
    _check_int8(x, w, columns, bias, up)
    return x.new_empty((x.shape[0], columns))


@_fake("linear_int8_into")
def _(x, w, bias, out):  # type: ignore[no-untyped-def]
    _check(out, "out", x.shape[0], None)
    _check_int8(x, w, out.shape[1], bias)


@_fake("rms_norm")
def _(x, weight, epsilon, weight_offset=0.0):  # type: ignore[no-untyped-def]
    _check(x, "x", None, None)
    _check(weight, "weight", x.shape[1])
    return x.new_empty(x.shape)


@_fake("layer_norm")
def _(x, residual, weight, bias, epsilon):  # type: ignore[no-untyped-def]
    _check(x, "x", None, None)
    _check(residual, "residual", *x.shape)
    _check(weight, "weight", x.shape[1])
    _check(bias, "bias", x.shape[1])
    return x.new_empty(x.shape)


@_fake("rotate_halves")
def _(x, cos, sin):  # type: ignore[no-untyped-def]
    _check(x, "x", None, None, None)
    _check(cos, "cos", x.shape[0], x.shape[2])
    _check(sin, "sin", x.shape[0], x.shape[2])
    return x.new_empty(x.shape)


@_fake("decoder_layer")
def _(x, cos, sin, *_):  # type: ignore[no-untyped-def]
    _check(x, "x", None, None)
    _check(cos, "cos", x.shape[0], None)
    _check(sin, "sin", *cos.shape)
    return x.new_empty(x.shape)


@_fake("encoder_layer")
def _(x, starts, *_):  # type: ignore[no-untyped-def]
    _check(x, "x", None, None)
    _check(starts, "starts", None)
    return x.new_empty(x.shape)
