"""The launchers' part for the emulated kernels: outputs and workspaces, then ``call``, an Emulation or a Replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.emulation.harness import Argument, dtype_name

Call = Callable[..., None]
BIAS_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
TILE = 64
UNWRITTEN = 12345.0  # what no kernel answers


def pool(
    call: Call,
    hidden: torch.Tensor,
    starts: torch.Tensor,
    kinds: torch.Tensor,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    sequences = starts.shape[0] - 1
    out = torch.full((sequences, hidden.shape[1]), UNWRITTEN)
    call(
        f"pool_{dtype_name(hidden)}", hidden, out, starts, kinds, dimensions, normalize, rows,
        sequences, *hidden.shape, hidden.stride(0),
    )  # fmt: skip
    return out


def _product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, softcap: float, scale: float
) -> list[Argument]:
    kind = 0 if bias is None else BIAS_TYPES[bias.dtype]
    return [x, w, bias, kind, x.stride(0), w.stride(0), x.shape[0], *w.shape, float(softcap), float(scale)]


def labels(
    call: Call,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_ids: torch.Tensor,
    label_starts: torch.Tensor,
    temperature: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """label_logits, or with a temperature label_scores."""
    out = torch.full(label_ids.shape, UNWRITTEN)
    product = _product(rows, weight, bias, softcap, scale)
    call(f"labels_{dtype_name(rows)}", *product, label_ids, label_starts, out.numel(), out, temperature)
    return out


def stream(
    call: Call,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_ids: torch.Tensor | None = None,
    label_starts: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
    tile_rows: int = 8,
) -> torch.Tensor:
    """logsumexp; with label ids and starts label_probabilities; with ids alone token_logprobs."""
    count = rows.shape[0] if label_ids is None else label_ids.shape[0]
    answer = 0 if label_ids is None else 1 if label_starts is not None else 2
    tiles = -(-weight.shape[0] // TILE)
    out, maxima, sums = torch.full((count,), UNWRITTEN), torch.empty(tiles, len(rows)), torch.empty(tiles, len(rows))
    product = _product(rows, weight, bias, softcap, scale)
    call(
        f"stream_{dtype_name(rows)}", *product, label_ids, label_starts, count, out, maxima, sums, answer, tile_rows
    )  # fmt: skip
    return out


def pool_sparse(
    call: Call,
    hidden: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile_rows: int = 8,
) -> torch.Tensor:
    sequences = starts.shape[0] - 1
    out = torch.full((sequences, weight.shape[0]), UNWRITTEN)
    product = _product(hidden, weight, bias, 0.0, 1.0)[:-2]
    call(f"splade_{dtype_name(hidden)}", *product, starts, sequences, out, tile_rows)
    return out


def lexical_weights(
    call: Call,
    hidden: torch.Tensor,
    starts: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: float,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, sequences = hidden.shape[0], starts.shape[0] - 1
    ids, weights = torch.full((count,), -7), torch.full((count,), UNWRITTEN)
    out_starts = torch.full((sequences + 1,), -7, dtype=torch.int32)
    call(
        f"lexical_{dtype_name(hidden)}", hidden, weight, starts, token_ids, skip, *hidden.shape, hidden.stride(0),
        skip.shape[0], sequences, bias, torch.empty(count), torch.empty(count), out_starts, ids, weights,
    )  # fmt: skip
    return ids, weights, out_starts


def delimiter_rows(
    call: Call, input_ids: torch.Tensor, starts: torch.Tensor, delimiter: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, rows = starts.shape[0] - 1, torch.full(input_ids.shape, -7)
    out_starts = torch.full((sequences + 1,), -7, dtype=torch.int32)
    call("delimiter", input_ids, input_ids.shape[0], starts, sequences, delimiter, out_starts, rows)
    return rows, out_starts


SAMPLE_EXTRAS = ("repetition", "frequency", "presence", "seen_ids", "seen_generated", "seen_starts", "bias_ids",
                 "bias_values", "bias_starts", "bitmask")  # fmt: skip


def sample(
    call: Call,
    logits: torch.Tensor,
    *parameters: torch.Tensor,
    top_logprobs: int = -1,
    **extras: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op's signature and answers."""
    rows, columns = logits.shape
    listed = max(top_logprobs, 0)
    answers = (
        torch.full((rows,), -7),
        torch.full((rows if top_logprobs >= 0 else 0,), UNWRITTEN),
        torch.full((rows, listed), -7),
        torch.full((rows, listed), UNWRITTEN),
    )
    counts = [extras[name].numel() if name in extras else 0 for name in ("seen_ids", "bias_ids")]
    call(
        f"sample_{dtype_name(logits)}", logits, *parameters, *(extras.get(name) for name in SAMPLE_EXTRAS),
        top_logprobs, *answers, torch.empty(rows, columns), rows, columns, logits.stride(0), *counts,
    )  # fmt: skip
    return answers
