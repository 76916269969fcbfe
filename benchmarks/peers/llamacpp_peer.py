"""llama.cpp on Generate with one stream, from the same weights as GGUF in bfloat16."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import llama_cpp
from common import best_seconds, load_job, report
from workload import NEW_TOKENS

job, work = load_job()
if job["gguf"] is None or job["dtype"] != "bfloat16":
    raise SystemExit("llama.cpp is measured on the demo decoder's GGUF in bfloat16 only")

source = Path(job["gguf"])
target = source.with_name("decoder-bfloat16.gguf")
if not target.exists():
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        raise SystemExit(f"llama.cpp could not requantise {source}")

cores = len(os.sched_getaffinity(0))
llm = llama_cpp.Llama(str(target), n_ctx=2048, n_threads=cores, n_threads_batch=cores, verbose=False)


def run() -> None:
    llm.reset()
    answer = llm(work.generate_prompts[0], max_tokens=NEW_TOKENS, temperature=0, logit_bias={llm.token_eos(): -1e9})
    if answer["usage"]["completion_tokens"] != NEW_TOKENS:
        raise SystemExit("llama.cpp stopped early")


seconds = best_seconds(run, job["repeats"])
report(
    engine="llama.cpp",
    version=llama_cpp.__version__,
    dtype=job["dtype"],
    task="generate",
    streams=1,
    tokens_per_s=NEW_TOKENS / seconds,
)
