"""What the server answers to the workload, for the check against the reference: off the clock, in the same run.

Each function asks in the way that is measured, all at once, and returns plain lists as the peers' runners do.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc.aio
from load import DECODER, ENCODER, RERANKER
from workload import LABELS, NEW_TOKENS, SHORT_TEXT, Workload, streams_of

from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)


async def answers(channel: grpc.aio.Channel, work: Workload, task: str) -> list[Any]:
    """Of ``embed`` and ``embed_one`` vectors, of ``rerank`` logits in the documents' order, of ``score``
    log-probabilities of the labels, of ``generate_…`` pairs of prompt and new token ids.
    """
    if task in ("embed", "embed_one"):
        return await _vectors(channel, work.embed_texts if task == "embed" else [SHORT_TEXT])
    if task == "rerank":
        return await _logits(channel, work)
    if task == "score":
        return await _log_probabilities(channel, work)
    prompts = [f"0 {prompt}" for prompt in work.generate_prompts[: streams_of(task)]]
    return await asyncio.gather(*(_continued(channel, prompt) for prompt in prompts))


def _inputs(texts: list[str]) -> list[common_pb2.Input]:
    return [common_pb2.Input(text=text) for text in texts]


async def _vectors(channel: grpc.aio.Channel, texts: list[str]) -> list[list[float]]:
    request = embed_pb2.EmbedRequest(model=ENCODER, inputs=_inputs(texts), truncation=common_pb2.TRUNCATION_RIGHT)
    answer = await embed_pb2_grpc.EmbedServiceStub(channel).Embed(request)
    return [list(result.dense.values) for result in answer.results]


async def _logits(channel: grpc.aio.Channel, work: Workload) -> list[float]:
    request = score_pb2.RerankRequest(
        model=RERANKER, query=work.rerank_query, documents=work.rerank_documents, raw_scores=True
    )
    answer = await score_pb2_grpc.ScoreServiceStub(channel).Rerank(request)
    return [result.score for result in sorted(answer.results, key=lambda result: result.index)]


async def _log_probabilities(channel: grpc.aio.Channel, work: Workload) -> list[list[float]]:
    request = score_pb2.ScoreRequest(
        model=DECODER,
        query=common_pb2.Input(text=f"0 {work.score_prefix}"),
        items=_inputs([f" {item}" for item in work.score_items]),
        labels=LABELS,
    )
    answer = await score_pb2_grpc.ScoreServiceStub(channel).Score(request)
    return [[math.log(score) for score in result.scores] for result in answer.results]


async def _continued(channel: grpc.aio.Channel, prompt: str) -> tuple[str, list[int]]:
    request = generate_pb2.GenerateRequest(
        model=DECODER,
        text=prompt,
        sampling=generate_pb2.Sampling(temperature=0.0),
        stop=generate_pb2.Stop(max_new_tokens=NEW_TOKENS, ignore_eos=True),
    )
    tokens: list[int] = []
    async for chunk in generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request):
        tokens += chunk.token_ids
    return prompt, tokens
