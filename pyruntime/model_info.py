"""What clients are told of a loaded model: its abilities and limits."""

from __future__ import annotations

from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel
from pyruntime.model.sentence import SentenceSettings
from pyruntime.types import Capability, EmbeddingKind, ModelInfo


def describe(name: str, loaded: LoadedModel, sentence: SentenceSettings, cache: KVCache | None) -> ModelInfo:
    """``cache`` is None for models without one.

    RERANK is not among the capabilities here: it hangs on a template too, and ``rerank_template`` decides.
    """
    limits = [loaded.max_positions]
    classifier, kinds = loaded.classifier, _embedding_kinds(loaded, sentence)
    if sentence.max_tokens:
        limits.append(sentence.max_tokens)
    if cache is not None:
        # One block is kept back: a sequence that forks from a shared prefix copies its last block.
        limits.append((cache.num_blocks - 1) * cache.block_size)
    return ModelInfo(
        name=name,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device,
        capabilities=_capabilities(loaded, kinds),
        context_length=min(limits),
        vocab_size=loaded.vocab_size,
        embedding_dimensions=(sentence.dimensions or loaded.hidden_size) if EmbeddingKind.DENSE in kinds else 0,
        default_pooling=sentence.pooling,
        normalize_default=sentence.normalize,
        prompts=sentence.prompts,
        default_prompt_name=sentence.default_prompt_name,
        labels=classifier.labels if classifier is not None else (),
        kv_cache_tokens=cache.num_blocks * cache.block_size if cache is not None else 0,
        embedding_kinds=kinds,
        token_embedding_dimensions=(
            (sentence.token_dimensions or loaded.hidden_size) if EmbeddingKind.PER_TOKEN in kinds else 0
        ),
        similarity=sentence.similarity,
        classifies_tokens=classifier is not None and classifier.classifies_tokens,
        late_interaction=sentence.late_interaction,
        execution_path=loaded.execution_path,
        weights_bytes=_weights_bytes(loaded),
        kv_cache_bytes=cache.num_bytes if cache is not None else 0,
        prompt_is_pooled=sentence.prompt_is_pooled,
        query_expansion=sentence.query_expansion,
        ignored_tail_id=classifier.ignored_tail_id if classifier is not None else None,
        quantization=loaded.quantization,
    )


def _embedding_kinds(loaded: LoadedModel, sentence: SentenceSettings) -> frozenset[EmbeddingKind]:
    """None for a classifier: its hidden rows are trained for its head, not to be compared."""
    return sentence.kinds if loaded.classifier is None else frozenset()


def _capabilities(loaded: LoadedModel, kinds: frozenset[EmbeddingKind]) -> frozenset[Capability]:
    """By the heads that the model has. A causal classifier of texts scores items by its own labels."""
    able = {Capability.SPARSE_EMBED if kind is EmbeddingKind.SPARSE else Capability.EMBED for kind in kinds}
    if loaded.output_head is not None:
        able |= {Capability.GENERATE, Capability.SCORE}
    if loaded.classifier is not None:
        able.add(Capability.CLASSIFY)
        if loaded.is_causal and not loaded.classifier.classifies_tokens:
            able.add(Capability.SCORE)
    return frozenset(able)


def _weights_bytes(loaded: LoadedModel) -> int:
    """Of the model's parameters and buffers, tied ones once; those without memory are weights that became int8."""
    tensors = [each for each in (*loaded.model.parameters(), *loaded.model.buffers()) if not each.is_meta]
    if loaded.output_head is not None:
        tensors += loaded.output_head.copies
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
