"""What clients are told of a loaded model: its abilities and limits."""

from __future__ import annotations

from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel
from pyruntime.model.sentence import SentenceSettings
from pyruntime.types import Capability, ModelInfo


def describe(name: str, loaded: LoadedModel, sentence: SentenceSettings, cache: KVCache | None) -> ModelInfo:
    """``cache`` is None for models without one."""
    limits = [loaded.max_positions]
    capabilities = {Capability.EMBED}
    if sentence.max_tokens:
        limits.append(sentence.max_tokens)
    if cache is not None:
        # One block is kept back: a sequence that forks from a shared prefix copies its last block.
        limits.append((cache.num_blocks - 1) * cache.block_size)
    if loaded.output_head is not None:
        capabilities |= {Capability.GENERATE, Capability.SCORE}
    return ModelInfo(
        name=name,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device,
        capabilities=frozenset(capabilities),
        context_length=min(limits),
        vocab_size=loaded.vocab_size,
        embedding_dimensions=loaded.hidden_size,
        default_pooling=sentence.pooling,
        normalize_default=sentence.normalize,
        prompts=sentence.prompts,
        default_prompt_name=sentence.default_prompt_name,
        kv_cache_tokens=cache.num_blocks * cache.block_size if cache is not None else 0,
    )
