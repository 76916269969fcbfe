"""llama.cpp on Generate with one stream, from the same GGUF requantised to bfloat16 or Q8_0.

Driven through the C interface, as its own programs do: the Python loop of the binding costs a copy of all logits and
NumPy calls a token. Tried: a thread a core; flash attention on and off (the faster is found at the start). The
interface has no drafts from the prompt; the binding's own (``LlamaPromptLookupDecoding``) needs the logits of all
rows in Python and was slower here than no drafts.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
from common import CORES, Task, fastest, load_job, serve
from workload import NEW_TOKENS

KINDS = {"bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


def requantised(source: Path, dtype: str) -> Path:
    """``source`` as Q8_0 or bfloat16, made on the first call."""
    target = source.with_name(f"{dtype}-of-{source.name}")
    if not target.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize, options.nthread = KINDS[dtype], True, CORES
        unfinished = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(options)):
            raise SystemExit(f"llama.cpp could not requantise {source}")
        unfinished.rename(target)
    return target


class Stream:
    """Greedy continuation of one prompt at a time, end of sequence ignored."""

    def __init__(self, model, flash: bool) -> None:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_threads, options.n_threads_batch = 2048, 512, CORES, CORES
        options.flash_attn_type = int(flash)
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._greedy = llama_cpp.llama_sampler_init_greedy()

    def run(self, prompt: list[int]) -> list[int]:
        llama_cpp.llama_memory_clear(self._memory, True)
        tokens, ids = [], prompt
        while len(tokens) < NEW_TOKENS:
            held = (llama_cpp.llama_token * len(ids))(*ids)  # the batch points into it
            if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(held, len(ids))):
                raise SystemExit("llama.cpp could not decode")
            ids = [llama_cpp.llama_sampler_sample(self._greedy, self._context, -1)]
            tokens += ids
        return tokens


def tokenized(vocabulary, text: str) -> list[int]:
    ids = (llama_cpp.llama_token * 512)()
    data = text.encode()
    return list(ids[: llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, 512, True, False)])


job = load_job()
llama_cpp.llama_backend_init()
silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(silence, None)
path = requantised(Path(job.models["gguf"]), job.dtype)
model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
vocabulary = llama_cpp.llama_model_get_vocab(model)
text = job.work.generate_prompts[0]
streams = {flash: Stream(model, flash) for flash in (False, True)}
flash = fastest([False, True], lambda choice: streams[choice].run(tokenized(vocabulary, text)))


def generate(_: int) -> list[list]:
    return [[text, streams[flash].run(tokenized(vocabulary, text))]]


serve("llama.cpp", llama_cpp.__version__, job, {"generate_1": Task(generate)}, {"flash attention": flash})
