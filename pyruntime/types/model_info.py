"""What is known of a served model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pyruntime.types.enums import Capability, EmbeddingKind, ExecutionPath, PoolingType


class QueryExpansion(NamedTuple):
    """What a late-interaction model does to queries: they are cut, then lengthened by ``token_id``.

    ``cut_to``: most tokens of a query, None for no limit of its own. ``length``: least tokens, 0 where nothing is
    appended. ``attended``: the other tokens see the appended ones; where they do not, ``EmbedRequest.unattended`` has
    to say so.
    """

    token_id: int
    length: int
    cut_to: int | None
    attended: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What ``GetModel`` tells and what the service checks requests against.

    ``embedding_dimensions``: width of a dense vector after every module; ``token_embedding_dimensions``: of a
    per-token one. ``labels``: the classifier's, by index. ``similarity``: cosine, dot, euclidean, manhattan, or empty.
    ``classifies_tokens``: the classifier answers for each token. ``late_interaction``: its per-token vectors are made
    to be compared by MaxSim. ``prompt_is_pooled``: False where pooling leaves the prompt's rows out
    (``EmbedRequest.skip_rows``). ``query_expansion``: what a late-interaction model does to queries.
    ``ignored_tail_id``: a classifier that reads the last token reads the last that is not this one. ``quantization``:
    none or int8.
    """

    name: str
    architecture: str
    dtype: str
    device: str
    capabilities: frozenset[Capability]
    context_length: int
    vocab_size: int
    embedding_dimensions: int
    default_pooling: PoolingType
    normalize_default: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    kv_cache_tokens: int = 0
    embedding_kinds: frozenset[EmbeddingKind] = frozenset({EmbeddingKind.DENSE})
    token_embedding_dimensions: int = 0
    similarity: str = ""
    classifies_tokens: bool = False
    late_interaction: bool = False
    execution_path: ExecutionPath = ExecutionPath.PACKED
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    prompt_is_pooled: bool = True
    query_expansion: QueryExpansion | None = None
    ignored_tail_id: int | None = None
    quantization: str = "none"
