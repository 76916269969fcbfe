"""vLLM's CPU build, in process, on Embed, Score and Generate. Score has no twin there: one greedy token
with its five most likely labels, which takes the same forward and the same softmax over the vocabulary.
"""

from __future__ import annotations

import gc
import os
from itertools import count

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="2", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))

import vllm
from common import best_seconds, load_job, report
from vllm import LLM, SamplingParams
from workload import NEW_TOKENS, STREAMS

job, work = load_job()
engine = {"engine": "vllm", "version": vllm.__version__, "dtype": job["dtype"]}
repeats = job["repeats"]


def decoder(prefix_caching: bool) -> LLM:
    return LLM(
        job["decoder"],
        dtype=job["dtype"],
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=prefix_caching,
    )


def embed() -> None:
    llm = LLM(job["encoder"], runner="pooling", dtype=job["dtype"])
    seconds = best_seconds(lambda: llm.embed(work.embed_texts, use_tqdm=False), repeats)
    report(**engine, task="embed", texts_per_s=len(work.embed_texts) / seconds)


def score() -> None:
    llm = decoder(prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    numbers = count(1)

    def run() -> None:
        # A new first word each run: the prefix is shared within a run and not across runs.
        number = next(numbers)
        prompts = [f"{number} {work.score_prefix} {item}" for item in work.score_items]
        llm.generate(prompts, params, use_tqdm=False)

    report(**engine, task="score", items_per_s=len(work.score_items) / best_seconds(run, repeats))


def generate() -> None:
    llm = decoder(prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for streams in STREAMS:
        prompts = work.generate_prompts[:streams]
        seconds = best_seconds(lambda prompts=prompts: llm.generate(prompts, params, use_tqdm=False), repeats)
        report(**engine, task="generate", streams=streams, tokens_per_s=streams * NEW_TOKENS / seconds)


for task in (embed, score, generate):
    task()
    gc.collect()
