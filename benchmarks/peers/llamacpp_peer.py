"""llama.cpp on Generate with one stream, from the same GGUF requantised to bfloat16 or Q8_0.

Without drafts it is driven through the C interface, as its own programs do: the Python loop of the binding copies all
logits of each token. With drafts (``…-drafts``) it is the binding's own prompt lookup. Tried: a thread a core, and
what is found at the start: flash attention on and off, drafts of 4 to 16 tokens.
"""

from __future__ import annotations

import ctypes
from itertools import islice
from pathlib import Path

import llama_cpp
from common import CORES, Task, fastest, load_job, serve
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from workload import NEW_TOKENS

KINDS = {"bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


def requantised(source: Path, dtype: str) -> Path:
    """``source`` in bfloat16 or Q8_0, made on the first call."""
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
        self._vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._greedy = llama_cpp.llama_sampler_init_greedy()

    def run(self, text: str) -> list[int]:
        llama_cpp.llama_memory_clear(self._memory, True)
        tokens, ids = [], self._tokenized(text)
        while len(tokens) < NEW_TOKENS:
            held = (llama_cpp.llama_token * len(ids))(*ids)  # the batch points into it
            if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(held, len(ids))):
                raise SystemExit("llama.cpp could not decode")
            ids = [llama_cpp.llama_sampler_sample(self._greedy, self._context, -1)]
            tokens += ids
        return tokens

    def _tokenized(self, text: str) -> list[int]:
        ids, data = (llama_cpp.llama_token * 512)(), text.encode()
        count = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), True, False)
        return list(ids[:count])


class DraftingStream:
    """The same with prompt lookup: ``length`` tokens that followed the last ones where these stood before."""

    def __init__(self, path: Path, length: int) -> None:
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=length)
        options = {"n_ctx": 2048, "n_threads": CORES, "n_threads_batch": CORES, "flash_attn": True, "verbose": False}
        self._llm = llama_cpp.Llama(str(path), draft_model=lookup, **options)

    def run(self, text: str) -> list[int]:
        self._llm.reset()
        return list(islice(self._llm.generate(self._llm.tokenize(text.encode()), temp=0.0, top_k=1), NEW_TOKENS))


job = load_job()
precision, _, drafts = job.dtype.partition("-")
path = requantised(Path(job.models["gguf"]), precision)
text = job.work.generate_prompts[0]

if drafts:
    streams = {length: DraftingStream(path, length) for length in (4, 8, 16)}
    setting = "length of drafts"
else:
    llama_cpp.llama_backend_init()
    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence, None)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    streams = {flash: Stream(model, flash) for flash in (False, True)}
    setting = "flash attention"

choice = fastest(list(streams), lambda choice: streams[choice].run(text))
stream = streams[choice]
streams.clear()
task = Task(lambda _: [[text, stream.run(text)]])
serve("llama.cpp", llama_cpp.__version__, job, {"generate_1": task}, {setting: choice})
