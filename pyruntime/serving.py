"""Puts one served model together: loader, self-check, cache, scheduler, runner, heads, engine, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig

from pyruntime.config import Settings
from pyruntime.engine import Engine
from pyruntime.errors import ModelLoadError
from pyruntime.gate import device_gate
from pyruntime.heads.dispatch import Heads
from pyruntime.model.kv_cache import KVCache, blocks_in_budget
from pyruntime.model.loader import LoadedModel, load_model, resolve_folder
from pyruntime.model.runner import ModelRunner
from pyruntime.model.sentence import read_sentence_settings
from pyruntime.model_info import describe
from pyruntime.registry import GenerationDefaults, ServedModel
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.self_check import check_scheduler, self_check
from pyruntime.tokenization import Tokenizer


def load_served_model(name: str, path: str, settings: Settings, progress: Callable[[str], None]) -> ServedModel:
    """Load, check and start one model. Raises ``ModelLoadError`` with the reason when it cannot be served right."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = resolve_folder(path, progress)
    progress(f"{name}: loading {folder.name}")
    tokenizer = _tokenizer(folder)
    loaded = load_model(folder, settings.dtype, settings.device, settings.deterministic)
    sentence = read_sentence_settings(folder, loaded.is_causal)
    if settings.self_check:
        progress(f"{name}: comparing the packed forward with eager transformers")
        _check(loaded, settings.kv_block_size)
    cache = _cache(loaded, settings)
    info = describe(name, loaded, sentence, cache)
    blocks = BlockPool(cache.num_blocks, cache.block_size) if cache is not None else None
    engine = Engine(
        info,
        Scheduler(
            blocks,
            settings.max_batch_tokens,
            settings.max_running_sequences,
            settings.max_prompt_tokens_beside,
            PrefixCache(blocks) if blocks is not None and settings.prefix_cache else None,
        ),
        _builder(loaded, settings.kv_block_size),
        ModelRunner(loaded, cache),
        Heads(loaded, sentence),
        max_queue_requests=settings.max_queue_requests,
        compute_gate=device_gate(settings.device),
    )
    return ServedModel(info, engine, tokenizer, _generation_defaults(folder, loaded, tokenizer))


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelLoadError(f"{folder}: tokenizer: {error}") from error


def _builder(loaded: LoadedModel, block_size: int) -> BatchBuilder:
    return BatchBuilder(block_size if loaded.is_causal else 0, loaded.device, loaded.takes_token_types)


def _check(loaded: LoadedModel, block_size: int) -> float:
    scheduler, num_blocks = check_scheduler(loaded, block_size)
    cache = None
    if loaded.is_causal:
        cache = KVCache(loaded.cache_shapes, num_blocks, block_size, loaded.dtype, loaded.device)
    return self_check(ModelRunner(loaded, cache), scheduler, _builder(loaded, block_size))


def _cache(loaded: LoadedModel, settings: Settings) -> KVCache | None:
    if not loaded.is_causal:
        return None
    shapes = loaded.cache_shapes
    size = settings.kv_block_size
    fitting = blocks_in_budget(shapes, size, loaded.dtype, settings.kv_cache_bytes)
    if fitting < 2:
        problem = f"holds {fitting} blocks of {size} tokens; 2 are needed"
        raise ModelLoadError(f"kv_cache_bytes {settings.kv_cache_bytes} {problem}")
    return KVCache(shapes, fitting, size, loaded.dtype, loaded.device)


def _generation_defaults(folder: Path, loaded: LoadedModel, tokenizer: Tokenizer) -> GenerationDefaults:
    """The folder's ``generation_config.json``; without it the config's and tokenizer's end-of-sequence ids."""
    if not (folder / "generation_config.json").is_file():
        return GenerationDefaults(eos_token_ids=_ids(loaded.config.eos_token_id) | tokenizer.eos_token_ids)
    config = GenerationConfig.from_pretrained(folder)
    return GenerationDefaults(
        temperature=config.temperature if config.do_sample is not False else None,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        eos_token_ids=_ids(config.eos_token_id) | tokenizer.eos_token_ids,
    )


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
