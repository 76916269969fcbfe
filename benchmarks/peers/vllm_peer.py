"""vLLM's CPU build, in process, on every task; a process for each model and setting.

Score has no twin in process: one greedy token with the log-probabilities of the labels, which takes the same forward
and the same softmax over the vocabulary. Tried: the five likeliest labels instead of the two that are asked for, as
older releases need it. With drafts (``…-drafts``) it looks them up in the prompt (``ngram``).
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))

import vllm
from common import Task, load_job, serve
from vllm import LLM, SamplingParams
from workload import LABELS, NEW_TOKENS, SHORT_TEXT, streams_of

job = load_job()
work = job.work
precision, _, drafts = job.dtype.partition("-")
LOOKUP = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
tasks: dict[str, Task] = {}


def decoder(prefix_caching: bool) -> LLM:
    return LLM(
        job.models["decoder"],
        dtype=precision,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=prefix_caching,
        speculative_config=LOOKUP if drafts else None,
    )


def add_embed() -> None:
    llm = LLM(job.models["encoder"], runner="pooling", dtype=precision, enable_prefix_caching=False)

    def vectors(outputs) -> list[list[float]]:
        return [output.outputs.embedding for output in outputs]

    tasks["embed"] = Task(lambda _: llm.embed(work.embed_texts, use_tqdm=False), vectors)
    tasks["embed_one"] = Task(lambda _: llm.embed([SHORT_TEXT], use_tqdm=False), vectors)


def add_rerank() -> None:
    llm = LLM(job.models["reranker"], runner="pooling", dtype=precision, enable_prefix_caching=False)
    raw = vllm.PoolingParams(use_activation=False)

    def rerank(_: int):
        return llm.score(work.rerank_query, work.rerank_documents, pooling_params=raw, use_tqdm=False)

    tasks["rerank"] = Task(rerank, lambda outputs: [output.outputs.score for output in outputs])


def add_score() -> None:
    llm = decoder(prefix_caching=True)
    tokenizer = llm.get_tokenizer()
    labels = [tokenizer.encode(label, add_special_tokens=False)[0] for label in LABELS]
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=labels)

    def score(number: int):
        # Another first word each time: the prefix is shared within a pass and not across passes.
        prompts = [f"{number} {work.score_prefix} {item}" for item in work.score_items]
        return llm.generate(prompts, params, use_tqdm=False)

    def log_probabilities(outputs) -> list[list[float]]:
        found = [output.outputs[0].logprobs[0] for output in outputs]
        return [[each[label].logprob for label in labels] for each in found]

    tasks["score"] = Task(score, log_probabilities)


def add_generate() -> None:
    llm = decoder(prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def task(streams: int) -> Task:
        return Task(lambda _: llm.generate(work.generate_prompts[:streams], params, use_tqdm=False), texts)

    def texts(outputs) -> list[list]:
        return [[output.prompt, list(output.outputs[0].token_ids)] for output in outputs]

    tasks.update({name: task(streams_of(name)) for name in job.tasks})


ADDERS = {"embed": add_embed, "embed_one": add_embed, "rerank": add_rerank, "score": add_score}
ADDERS.get(job.tasks[0], add_generate)()
serve("vllm", vllm.__version__, job, tasks, {})
