"""Puts one served model together: loader, self-check, cache, scheduler, runner, heads, engine, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from pyruntime.config import Settings
from pyruntime.constraints.vocabulary import prepare_vocabulary
from pyruntime.engine import Engine
from pyruntime.errors import ModelLoadError
from pyruntime.heads.dispatch import Heads
from pyruntime.machine import compute_threads
from pyruntime.model.classifier_settings import read_cross_encoder_settings
from pyruntime.model.device import check_device
from pyruntime.model.graphs import CapturedSteps, CudaRecorder, NotCapturable
from pyruntime.model.kv_cache import KVCache, blocks_in_budget, bytes_for_cache, free_bytes
from pyruntime.model.loader import LoadedModel, load_model, resolve_folder
from pyruntime.model.probe import LEAST_COSINE
from pyruntime.model.runner import ModelRunner
from pyruntime.model.sentence import SentenceSettings, read_sentence_settings
from pyruntime.model_info import describe
from pyruntime.registry import GenerationDefaults, ServedModel
from pyruntime.rerank_folder import rerank_template_of
from pyruntime.rerank_template import with_rerank
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.cost import DEFAULT_EQUAL_DEPTH
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.speculation import Speculation
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.self_check import check_scheduler, self_check
from pyruntime.step_thread import device_thread
from pyruntime.tokenization import Tokenizer
from pyruntime.types import SAMPLING_RANGES, Capability


class Compute:
    """Batch builder, runner and heads as an engine sees them, until they are let go.

    An engine may be held longer than its model is wanted: gRPC keeps the state of a server's last call until the next
    one comes, and with it what that call worked with. Weights and cache must not stay for that.
    """

    def __init__(self, builder: BatchBuilder, runner: ModelRunner, heads: Heads) -> None:
        self.build = builder.build
        self.forward = runner.forward
        self.read = heads.read

    def release(self) -> None:
        """Call it once there are no steps any more; again does no harm."""
        self.__dict__.clear()


def load_served_model(
    name: str, path: str, settings: Settings, progress: Callable[[str], None], num_sharing: int | None = None
) -> ServedModel:
    """Load, check and start one model. Raises ``ModelLoadError`` with the reason when it cannot be served right.

    ``num_sharing``: this model and those after it that divide a share of the memory, as in ``bytes_for_cache``.
    """
    check_device(settings.device)
    # One number for the whole process: the engines of a device take turns, and each step has all of the threads.
    torch.set_num_threads(compute_threads(settings.threads or torch.get_num_threads()))
    folder = resolve_folder(path, progress)
    progress(f"{name}: loading {folder.name}")
    _check_fits(folder, settings.device)
    tokenizer = _tokenizer(folder)
    loaded = load_model(folder, settings.dtype, settings.device, settings.deterministic, settings.quantization)
    sentence = _sentence(folder, loaded)
    if settings.self_check:
        progress(f"{name}: comparing the packed forward with eager transformers")
        _check(loaded, settings.kv_block_size)
    cache = _cache(loaded, settings, num_sharing)
    template = rerank_template_of(folder, loaded.architecture, tokenizer)
    info = with_rerank(describe(name, loaded, sentence, cache), template)
    runner = ModelRunner(loaded, cache)
    shapes = _captured(name, runner, settings, progress)
    compute = Compute(_builder(loaded, settings.kv_block_size, shapes), runner, Heads(loaded, sentence))
    engine = Engine(
        info,
        _scheduler(loaded, cache, settings),
        compute,
        compute,
        compute,
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_time_s=settings.max_queue_time_s,
        stream_buffer_tokens=settings.stream_buffer_tokens,
        thread=device_thread(settings.device),
        lends_steps=settings.device == "cpu" and cache is None and bool(loaded.layers),
    )
    defaults = _generation_defaults(folder, loaded, tokenizer)
    if Capability.GENERATE in info.capabilities:
        prepare_vocabulary(tokenizer, info.vocab_size, defaults.eos_token_ids or tokenizer.eos_token_ids)
    return ServedModel(info, engine, tokenizer, defaults, template, compute.release)


def _check_fits(folder: Path, device: str) -> None:
    """Too large a model would take the whole process with it, and what it serves."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    needed, free = sum(file.stat().st_size for file in files), free_bytes(device)
    if needed > free:
        raise ModelLoadError(f"{folder}: its weights are {needed} bytes; {free} are free on {device}")


def _sentence(folder: Path, loaded: LoadedModel) -> SentenceSettings:
    if loaded.classifier is not None:
        return read_cross_encoder_settings(folder)
    return read_sentence_settings(folder, loaded.is_causal)


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelLoadError(f"{folder}: tokenizer: {error}") from error


def _scheduler(loaded: LoadedModel, cache: KVCache | None, settings: Settings) -> Scheduler:
    blocks = BlockPool(cache.num_blocks, cache.block_size) if cache is not None else None
    windows = [traits.window for traits in loaded.layers.values()] if cache is not None else []
    return Scheduler(
        blocks,
        settings.max_batch_tokens,
        settings.max_running_sequences,
        settings.max_prompt_tokens_beside,
        PrefixCache(blocks) if blocks is not None and settings.prefix_cache else None,
        max_pause_factor=settings.max_pause_factor,
        priority_ageing_s=settings.priority_ageing_s,
        task_shares=settings.task_shares,
        # Blocks are let go only where no layer looks further back; the widest window then decides.
        window=max((window for window in windows if window), default=None) if all(windows) else None,
        equal_cost_depth=_equal_cost_depth(loaded),
        head_cost_depth=_head_cost_depth(loaded),
        speculation=_speculation(settings),
    )


def _speculation(settings: Settings) -> Speculation | None:
    return Speculation(settings.max_draft_tokens, settings.max_draft_rows) if settings.speculation == "auto" else None


def _equal_cost_depth(loaded: LoadedModel) -> int:
    """K of ``scheduler/cost.py``: the linears' multiplications a token over those of one query-key pair, all layers.

    Experts, whose weights have three axes, are left out, and a layer with a sliding window counts as if it read all
    keys: too small a K only makes chunks shorter. At least 1, since 0 would mean that attention costs nothing.
    """
    if not loaded.layers or not isinstance(_num_heads(loaded), int):
        return DEFAULT_EQUAL_DEPTH
    tables = [module.weight for module in loaded.body.modules() if isinstance(module, torch.nn.Embedding)]
    linears = sum(each.numel() for each in loaded.body.parameters() if each.ndim == 2)
    linears -= sum(table.numel() for table in tables)
    return max(1, linears // _pair_cost(loaded))


def _head_cost_depth(loaded: LoadedModel) -> int:
    """How many query-key pairs, all layers, cost as many multiplications as the vocabulary for one row."""
    if loaded.output_head is None or not loaded.layers or not isinstance(_num_heads(loaded), int):
        return 0
    return loaded.output_head.weight.numel() // _pair_cost(loaded)


def _pair_cost(loaded: LoadedModel) -> int:
    shapes = loaded.cache_shapes.values()
    return sum(_num_heads(loaded) * (shape.key_width + shape.value_width) for shape in shapes)


def _num_heads(loaded: LoadedModel) -> Any:
    return getattr(loaded.config, "num_attention_heads", None)


def _builder(loaded: LoadedModel, block_size: int, shapes: StepShapes | None = None) -> BatchBuilder:
    return BatchBuilder(block_size if loaded.is_causal else 0, loaded.device, loaded.takes_token_types, shapes)


def _has_graphs(loaded: LoadedModel, settings: Settings) -> bool:
    return settings.cuda_graphs == "on" and loaded.device != "cpu"


def _captured(name: str, runner: ModelRunner, settings: Settings, progress: Callable[[str], None]) -> StepShapes | None:
    """Shapes of steps that the runner replays from now on; None: it runs all kernel by kernel."""
    loaded, cache = runner.loaded, runner.cache
    if cache is None or not cache.has_spare:
        return None
    most_rows = max(settings.max_running_sequences, settings.max_draft_rows)
    shapes = StepShapes(most_rows, loaded.max_positions, cache.num_blocks, cache.block_size)
    progress(f"{name}: capturing decode steps")
    builder = _builder(loaded, cache.block_size, shapes)
    batches = ((builder.padding(shape), builder.rehearsed(shape)) for shape in shapes.all())
    try:
        recorder = CudaRecorder(loaded.device)
        runner.captured = CapturedSteps(runner.compute, batches, recorder, LEAST_COSINE[loaded.dtype])
    except NotCapturable as error:
        progress(f"{name}: decode steps run without graphs: {error}")
        return None
    except RuntimeError as error:  # torch's; a capture that broke off leaves its allocator unfit
        raise ModelLoadError(
            f"{name}: capturing its decode steps failed ({error}); cuda_graphs off does not"
        ) from error
    return shapes


def _check(loaded: LoadedModel, block_size: int) -> float:
    scheduler, num_blocks = check_scheduler(loaded, block_size)
    cache = None
    if loaded.is_causal:
        cache = KVCache(loaded.cache_shapes, num_blocks, block_size, loaded.dtype, loaded.device)
    return self_check(ModelRunner(loaded, cache), scheduler, _builder(loaded, block_size))


def _cache(loaded: LoadedModel, settings: Settings, num_sharing: int | None) -> KVCache | None:
    if not loaded.is_causal:
        return None
    shapes = loaded.cache_shapes
    size = settings.kv_block_size
    num_bytes = bytes_for_cache(settings.kv_cache_bytes, loaded.device, num_sharing)
    fitting = blocks_in_budget(shapes, size, loaded.dtype, num_bytes)
    has_spare = _has_graphs(loaded, settings)
    least = 2 + has_spare
    if fitting < least:
        problem = f"of which {num_bytes} bytes are left, holds {fitting} blocks of {size} tokens; {least} are needed"
        raise ModelLoadError(f"kv_cache_bytes {settings.kv_cache_bytes}, {problem}")
    return KVCache(shapes, fitting - has_spare, size, loaded.dtype, loaded.device, has_spare)


def _generation_defaults(folder: Path, loaded: LoadedModel, tokenizer: Tokenizer) -> GenerationDefaults:
    """The folder's ``generation_config.json``; without it the config's and tokenizer's end-of-sequence ids."""
    if not (folder / "generation_config.json").is_file():
        return GenerationDefaults(eos_token_ids=_ids(loaded.config.eos_token_id) | tokenizer.eos_token_ids)
    config = GenerationConfig.from_pretrained(folder)
    _check_defaults(config)
    return GenerationDefaults(
        temperature=config.temperature if config.do_sample is not False else None,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        eos_token_ids=_ids(config.eos_token_id) | tokenizer.eos_token_ids,
    )


def _check_defaults(config: GenerationConfig) -> None:
    """Values that no request could have would make each request fail that sets no own."""
    for name, (low, high, open_low) in SAMPLING_RANGES.items():
        value = getattr(config, name, None)
        is_good = value is None or (isinstance(value, int | float) and low <= value <= high)
        if not is_good or (open_low and value == low):
            allowed = f"{'above ' if open_low else ''}{low} to {high}"
            raise ModelLoadError(f"generation_config.json: {name} {value!r} is out of range; allowed: {allowed}")
    if config.top_k is not None and not isinstance(config.top_k, int):
        raise ModelLoadError(f"generation_config.json: top_k {config.top_k!r} is no whole number")


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
