"""Hidden rows of packed sequences to one vector each, dense or sparse.

hidden ``[T, H]`` is float32, bfloat16 or float16 with a dense last dimension; sequence i owns its rows
``starts[i]:starts[i+1]``, starts int32 ``[S+1]``. A sequence's answer does not depend on the others. Bad arguments
raise ``RuntimeError``.
"""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def pool(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    kinds: torch.Tensor,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden ``[T, H]`` → float32 ``[S, H]``; row i is its vector in the first ``dimensions[i]`` entries, zeros after.

    starts int32 ``[S+1]`` (no empty sequence), kinds int32 ``[S]`` (0 last row, 1 first row, 2 mean of rows, summed in
    float32, 3 packed row ``rows[i]`` of its own), dimensions int32 ``[S]`` in 1..H, normalize bool ``[S]``: after the
    cut, divided by max(L2 norm, 1e-12), so a zero vector stays zero; rows int64 ``[S]``, read where the kind is 3.
    """
    out: torch.Tensor = torch.ops.pyruntime.pool(hidden, starts, kinds, dimensions, normalize, rows)
    return out


def pool_sparse(
    hidden: torch.Tensor, starts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """SPLADE: per sequence, max over its tokens of log(1 + relu(hidden·weight[v] + bias[v])) for every entry v.

    weight ``[V, H]`` of hidden's dtype, bias ``[V]`` → a list of S pairs (ids int64 ``[n]`` ascending, weights float32
    ``[n]``) of the entries that are not zero (NaN counts). Sums are float32; the ``[T, V]`` logits never exist.
    """
    dense = torch.ops.pyruntime.pool_sparse(hidden, starts, weight, bias)
    return [(ids := row.nonzero()[:, 0], row[ids]) for row in dense]


def lexical_weights(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: float,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BGE-M3: relu(hidden[t]·weight + bias) for the id of every token t, the largest of an id's in its sequence.

    token_ids int64 ``[T]``, weight ``[H]`` of hidden's dtype, skip int64 ``[K]``: ids that are left out (the special
    ones) → ids int64 ``[N]``, ascending in each sequence, weights float32 ``[N]`` (zeros left out), and the starts
    int32 ``[S+1]`` of each sequence's.
    """
    ids, weights, out_starts = torch.ops.pyruntime.lexical_weights(hidden, starts, token_ids, weight, bias, skip)
    count = int(out_starts[-1])
    return ids[:count], weights[:count], out_starts


def delimiter_rows(input_ids: torch.Tensor, starts: torch.Tensor, delimiter: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed row before each ``delimiter`` after the first of every sequence, where an item of it ends.

    input_ids int64 ``[T]`` → rows int64 ``[N]`` and the starts int32 ``[S+1]`` of each sequence's. A sequence without a
    second delimiter has none.
    """
    rows, out_starts = torch.ops.pyruntime.delimiter_rows(input_ids, starts, delimiter)
    return rows[: int(out_starts[-1])], out_starts
