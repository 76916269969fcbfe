"""The nouns that all layers share: requests going down, the batch, results coming up.

Token ids are plain ``int`` lists here; tensors appear only in ``ForwardBatch``, which the batch
builder makes and the model and heads read.
"""

from pyruntime.types.batch import (
    ClassificationBatchResult,
    EmbeddingBatchResult,
    ForwardBatch,
    GenerationBatchResult,
    ScoringBatchResult,
    SequenceRows,
    StepShape,
)
from pyruntime.types.enums import TASKS, Capability, EmbeddingKind, ExecutionPath, FinishReason, PoolingType, Task
from pyruntime.types.model_info import ModelInfo, QueryExpansion
from pyruntime.types.requests import (
    SAMPLING_RANGES,
    ClassifyRequest,
    EmbedRequest,
    GenerateRequest,
    SamplingParams,
    ScoreRequest,
    StopParams,
)
from pyruntime.types.results import (
    ClassifyResult,
    EmbedResult,
    PromptLogprobs,
    SampledToken,
    ScoreResult,
    SparseVector,
    StepTiming,
    TokenEvent,
)

__all__ = [
    "SAMPLING_RANGES",
    "TASKS",
    "Capability",
    "ClassificationBatchResult",
    "ClassifyRequest",
    "ClassifyResult",
    "EmbedRequest",
    "EmbedResult",
    "EmbeddingBatchResult",
    "EmbeddingKind",
    "ExecutionPath",
    "FinishReason",
    "ForwardBatch",
    "GenerateRequest",
    "GenerationBatchResult",
    "ModelInfo",
    "PoolingType",
    "PromptLogprobs",
    "QueryExpansion",
    "SampledToken",
    "SamplingParams",
    "ScoreRequest",
    "ScoreResult",
    "ScoringBatchResult",
    "SequenceRows",
    "SparseVector",
    "StepShape",
    "StepTiming",
    "StopParams",
    "Task",
    "TokenEvent",
]
