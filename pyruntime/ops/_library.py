"""Loads the compiled module, which registers ``torch.ops.pyruntime.*``, and tells torch the shapes of its answers."""

from __future__ import annotations

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


@torch.library.register_fake("pyruntime::packed_attention")
def _(q, k, v, starts, causal, scale, window_left, window_right, softcap, sinks):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@torch.library.register_fake("pyruntime::paged_attention")
def _(q, k_cache, v_cache, query_starts, kv_lengths, block_tables, causal, scale, window_left, softcap, sinks):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))


@torch.library.register_fake("pyruntime::store_kv")
def _(k, v, slot_mapping, k_cache, v_cache):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("pyruntime::copy_blocks")
def _(k_cache, v_cache, pairs):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("pyruntime::pool")
def _(hidden, starts, kinds, dimensions, normalize, rows=None):  # type: ignore[no-untyped-def]
    return hidden.new_empty((starts.shape[0] - 1, hidden.shape[1]), dtype=torch.float32)


@torch.library.register_fake("pyruntime::pool_sparse")
def _(hidden, starts, weight, bias=None):  # type: ignore[no-untyped-def]
    return hidden.new_empty((starts.shape[0] - 1, weight.shape[0]), dtype=torch.float32)


@torch.library.register_fake("pyruntime::lexical_weights")
def _(hidden, starts, token_ids, weight, bias, skip):  # type: ignore[no-untyped-def]
    return torch.empty_like(token_ids), weight.new_empty(token_ids.shape, dtype=torch.float32), torch.empty_like(starts)


@torch.library.register_fake("pyruntime::delimiter_rows")
def _(input_ids, starts, delimiter):  # type: ignore[no-untyped-def]
    return torch.empty_like(input_ids), torch.empty_like(starts)


@torch.library.register_fake("pyruntime::label_logits")
def _(rows, weight, bias, label_ids, label_starts):  # type: ignore[no-untyped-def]
    return rows.new_empty((label_ids.shape[0],), dtype=torch.float32)


@torch.library.register_fake("pyruntime::label_scores")
def _(rows, weight, bias, label_ids, label_starts, temperature, *, softcap=0.0, scale=1.0):  # type: ignore[no-untyped-def]
    return rows.new_empty((label_ids.shape[0],), dtype=torch.float32)


@torch.library.register_fake("pyruntime::label_probabilities")
def _(rows, weight, bias, label_ids, label_starts, *, softcap=0.0, scale=1.0):  # type: ignore[no-untyped-def]
    return rows.new_empty((label_ids.shape[0],), dtype=torch.float32)


@torch.library.register_fake("pyruntime::token_logprobs")
def _(rows, weight, bias, token_ids, *, softcap=0.0, scale=1.0):  # type: ignore[no-untyped-def]
    return rows.new_empty((rows.shape[0],), dtype=torch.float32)


@torch.library.register_fake("pyruntime::logsumexp")
def _(rows, weight, bias, softcap, scale):  # type: ignore[no-untyped-def]
    return rows.new_empty((rows.shape[0],), dtype=torch.float32)


@torch.library.register_fake("pyruntime::sample")
def _(logits, temperature, top_k, top_p, min_p, seeds, positions, indices, *, top_logprobs=-1, **_extras):  # type: ignore[no-untyped-def]
    batch, listed = logits.shape[0], max(0, top_logprobs)
    ids = logits.new_empty((batch,), dtype=torch.int64)
    logprobs = logits.new_empty((batch if top_logprobs >= 0 else 0,), dtype=torch.float32)
    top_ids = logits.new_empty((batch, listed), dtype=torch.int64)
    return ids, logprobs, top_ids, logits.new_empty((batch, listed), dtype=torch.float32)


@torch.library.register_fake("pyruntime::linear_rows")
def _(x, w, bias):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[0]))


@torch.library.register_fake("pyruntime::linear_rows_int8")
def _(x, w, scales, bias=None):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[0]))
