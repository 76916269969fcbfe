"""The packed batch of one forward, and what its heads make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyruntime.types.enums import Task
from pyruntime.types.results import SampledToken

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class SequenceRows:
    """Where one sequence's rows lie in a ``ForwardBatch`` and what to do with them.

    ``start``/``length``: its rows in the packed batch. ``reads``: True when this step reaches the end
    of what is known of the sequence, so a head reads it; False for a prompt chunk that goes on.
    ``drafts``: its last rows are of these tokens, which are guessed and not known; a sampler reads all of them, and the
    row before them.
    """

    sequence: Any
    task: Task
    start: int
    length: int
    reads: bool
    drafts: Sequence[int] = ()

    @property
    def last(self) -> int:
        """The packed row of its last known token, which a sampler or score head reads."""
        return self.start + self.length - 1 - len(self.drafts)


class StepShape(NamedTuple):
    """What a captured step is captured for: so many rows, as many sequences, block tables so many ``blocks`` wide."""

    rows: int
    blocks: int


@dataclass(slots=True)
class ForwardBatch:
    """One packed forward over sequences of any task. T tokens, S sequences.

    input_ids, positions        int64 [T]
    token_type_ids              int64 [T] or None
    query_starts                int32 [S+1], rows of sequence i are query_starts[i]:query_starts[i+1]
    kv_lengths                  int32 [S], keys that sequence i holds after this step (None: no cache)
    block_tables                int32 [S, most blocks], -1 padded (None: no cache)
    slot_mapping                int64 [T], cache slot (block * block_size + offset) of each new key
    block_copies                int64 [C, 2] (source, target) blocks copied before the forward, or None
    shape                       what the batch is padded to, behind its own rows and sequences; None: it is not
    """

    rows: list[SequenceRows]
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    token_type_ids: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    block_copies: torch.Tensor | None = None
    shape: StepShape | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(slots=True)
class GenerationBatchResult:
    """tokens[i] belongs to the i-th reading GENERATE row; None where its logits were not finite."""

    tokens: list[SampledToken | None]


@dataclass(slots=True)
class EmbeddingBatchResult:
    """What ``EmbedResult.values`` says, one for each reading EMBED row; None where not finite."""

    embeddings: list[object | None]


@dataclass(slots=True)
class ScoringBatchResult:
    """Label probabilities, one list for each reading SCORE row; None where not finite."""

    scores: list[list[float] | None]


@dataclass(slots=True)
class ClassificationBatchResult:
    """What ``ClassifyResult.scores`` says, one for each reading CLASSIFY row; None where not finite."""

    scores: list[object | None]
