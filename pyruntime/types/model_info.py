"""What is known of a served model."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyruntime.types.enums import Capability, EmbeddingKind, ExecutionPath, PoolingType


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What ``GetModel`` tells and what the service checks requests against.

    ``embedding_dimensions``: width of a dense vector after every module; ``token_embedding_dimensions``: of a
    per-token one. ``labels``: the classifier's, by index. ``similarity``: cosine, dot, euclidean, manhattan, or empty.
    ``classifies_tokens``: the classifier answers for each token.
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
    execution_path: ExecutionPath = ExecutionPath.PACKED
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
