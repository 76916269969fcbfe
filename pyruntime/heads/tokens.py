"""One vector a token: each hidden row through the model's projection, cut and normalised by itself."""

from __future__ import annotations

import torch

from pyruntime.model.loader import LoadedModel
from pyruntime.model.sentence import SentenceSettings
from pyruntime.ops import pooling
from pyruntime.types import ForwardBatch, PoolingType, SequenceRows


class TokenHead:
    """Vectors in the order of the tokens, special tokens among them.

    Left out are the tokens that a late-interaction folder names (of documents; of queries where it says so), and the
    first token of each input under BGE-M3's own token head. A prompt cut into chunks leaves its finished vectors
    behind, which are the answer's own size.
    """

    def __init__(self, loaded: LoadedModel, sentence: SentenceSettings) -> None:
        own = sentence.lexical.tokens if sentence.lexical is not None else None
        self._leaves_first = own is not None
        projection = own if own is not None else sentence.projection
        self._project = projection.steps.to(loaded.device) if projection is not None else None
        late = sentence.late
        self._skipped = torch.tensor(late.skipped_ids if late is not None else (), dtype=torch.int64).to(loaded.device)
        self._skips_in_queries = late is not None and late.skips_in_queries

    def read(self, hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]) -> list[object | None]:
        """float32 [tokens, dimensions] for each of ``chosen``; None where not finite."""
        answers: list[object | None] = []
        for rows, vectors in zip(chosen, self._vectors(hidden, batch, chosen), strict=True):
            whole = torch.cat([*rows.sequence.partial_hidden, vectors])
            rows.sequence.partial_hidden = []
            answers.append(whole.numpy() if bool(torch.isfinite(whole).all()) else None)
        return answers

    def keep_partial(self, hidden: torch.Tensor, batch: ForwardBatch, rows: SequenceRows) -> None:
        """Remember the vectors of a chunk that is not the sequence's last."""
        rows.sequence.partial_hidden.append(self._vectors(hidden, batch, [rows])[0])

    def _vectors(self, hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]) -> list[torch.Tensor]:
        kept = [self._kept(batch, rows) for rows in chosen]
        counts = [int(each.shape[0]) for each in kept]
        requests = [rows.sequence.payload for rows in chosen]
        if not sum(counts):
            return [torch.zeros(0, request.dimensions) for request in requests]
        vectors = hidden[torch.cat(kept)]
        if self._project is not None:
            vectors = self._project(vectors.float())
        widths = [request.dimensions for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        normalize = [request.normalize for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        finished = cut_and_normalize(vectors, widths, normalize).split(counts)
        return [own[:, : request.dimensions] for own, request in zip(finished, requests, strict=True)]

    def _kept(self, batch: ForwardBatch, rows: SequenceRows) -> torch.Tensor:
        """The packed rows of one sequence's tokens that have a vector, int64."""
        start = rows.start + (1 if self._leaves_first else 0)
        kept = torch.arange(start, rows.start + rows.length, device=batch.input_ids.device)
        if self._skipped.numel() and (self._skips_in_queries or not rows.sequence.payload.as_query):
            kept = kept[~torch.isin(batch.input_ids[kept], self._skipped)]
        return kept


def cut_and_normalize(vectors: torch.Tensor, widths: list[int], normalize: list[bool]) -> torch.Tensor:
    """Rows [n, W] → float32 [n, W] on the host: the first ``widths[i]`` of each, zeros after, normalised or not."""
    count, device = vectors.shape[0], vectors.device
    return pooling.pool(
        vectors.contiguous(),
        torch.arange(count + 1, dtype=torch.int32, device=device),
        torch.full((count,), int(PoolingType.LAST), dtype=torch.int32, device=device),
        torch.tensor(widths, dtype=torch.int32, device=device),
        torch.tensor(normalize, device=device),
    ).cpu()
