"""With the option ``deterministic`` every kind of answer is the same bits through batches, chunks, caches and faults.

Random rounds: other requests beside, other step budgets, a cold or a warm prefix cache, sequences set back and
paused, blocks that a window frees, and steps that fail and are run again in halves.
"""

import asyncio
import contextlib
import dataclasses
import random

import pytest
from sentence_transformers import SparseEncoder
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.types import (
    Capability,
    ClassifyRequest,
    EmbeddingKind,
    EmbedRequest,
    GenerateRequest,
    PoolingType,
    SamplingParams,
    ScoreRequest,
    StopParams,
)
from tests.fake_compute import until
from tests.models.rank_folders import byte_level_tokenizer, save_model
from tests.models.sentence_folders import COMMON, masked_lm_folder

BUFFER = 4
# An odd inner width, four times as many cache bytes a token as these models would need, and ids within the vocabulary.
ODD = {"intermediate_size": 100, "head_dim": 64, "num_key_value_heads": 4, "num_labels": 3}
ODD |= {"pad_token_id": 1, "eos_token_id": 1, "bos_token_id": 0}
WINDOW = ODD | {"sliding_window": 24, "max_position_embeddings": 512}
# name → (class, architecture, fields, random rounds)
KINDS = {
    "decoder": (AutoModelForCausalLM, "qwen3", ODD, 50),
    "windowed": (AutoModelForCausalLM, "mistral", WINDOW, 15),
    "classifier": (AutoModelForSequenceClassification, "qwen3", ODD, 15),
    "of tokens": (AutoModelForTokenClassification, "qwen3", ODD, 10),
    "sparse": (None, "", {}, 10),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    factory, model_type, fields, rounds = KINDS[request.param]
    if factory is None:
        body = masked_lm_folder(folder / "body", "bert", COMMON | {"intermediate_size": 100})
        modules = [Transformer(str(body), transformer_task="fill-mask"), SpladePooling()]
        folder = folder / "sparse"
        SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)
    else:
        save_model(folder, factory, model_type, len(byte_level_tokenizer(folder)), **fields)
    settings = Settings(
        dtype="float32",
        deterministic=True,
        max_batch_tokens=512,
        max_prompt_tokens_beside=512,
        kv_cache_bytes=2**20,
        stream_buffer_tokens=BUFFER,
    )
    loaded = load_served_model("small", str(folder), settings, lambda _: None)
    yield loaded, rounds
    loaded.engine.close()


class Requests:
    """Makes requests of whatever the model can do, and answers to compare."""

    def __init__(self, model, draw):
        self._model, self._draw = model, draw
        self._shared = self._ids(33)
        info = model.info
        able = {
            "generate": Capability.GENERATE in info.capabilities,
            "embed": bool(info.embedding_kinds),
            "score": Capability.GENERATE in info.capabilities,
            "classify": bool(info.labels),
        }
        self.kinds = [kind for kind, can in able.items() if can]

    def _ids(self, length):
        return [self._draw.randrange(5, min(self._model.info.vocab_size, 60)) for _ in range(length)]

    def _text(self):
        shared = self._shared if self._draw.random() < 0.5 else []
        return [*shared, *self._ids(self._draw.choice([1, 4, 15, 31]))]

    def of(self, kind, place):
        return getattr(self, f"_{kind}")(place)

    def _generate(self, place):
        sampling = SamplingParams(temperature=place % 2 * 1.3, top_p=0.9, seed=place, logprobs=2)
        return GenerateRequest(self._text(), sampling, StopParams(9), n=1 + place % 3)

    def _embed(self, place):
        inputs, kinds = [self._text() for _ in range(3)], sorted(self._model.info.embedding_kinds, key=str)
        kind, pooling = kinds[place % len(kinds)], list(PoolingType)[place % 3]
        skip = [2, 0, 3] if place % 4 == 1 and kind is EmbeddingKind.DENSE else None
        return EmbedRequest(inputs, pooling, place % 2 == 0, 64, kind=kind, skip_rows=skip)

    def _score(self, place):
        items = [self._ids(self._draw.randrange(1, 9)) for _ in range(4)]
        return ScoreRequest(self._text(), items, [5, 6, 7], apply_softmax=place % 2 == 0)

    def _classify(self, place):
        prefix = self._text() if place % 2 else []
        return ClassifyRequest([self._text() for _ in range(3)], raw=place % 3 == 0, prefix=prefix)

    async def answer(self, request, waits=False):
        """``waits``: the client of a stream does not read until its sequences are paused, or have ended."""
        engine = self._model.engine
        if not isinstance(request, GenerateRequest):
            send = {EmbedRequest: engine.embed, ScoreRequest: engine.score, ClassifyRequest: engine.classify}
            results, _ = await send[type(request)](request)
            return [bits(getattr(each, "values", None) if hasattr(each, "values") else each.scores) for each in results]
        stream, tokens = engine.generate(request), {index: [] for index in range(request.n)}
        if waits:
            await until(lambda: stream._job.paused or stream._job.done)
        async for events in stream:
            for event in events:
                tokens[event.index].append((event.token_id, event.logprob, event.top))
        return tokens


def bits(value):
    if isinstance(value, tuple):
        return tuple(each.tobytes() for each in value)
    return value if isinstance(value, list) else (value.shape, value.tobytes())


@contextlib.contextmanager
def circumstances(engine, draw):
    """Another budget for a step, and steps that fail before or after their forward."""
    scheduler, compute = engine._scheduler, engine._steps._runner
    limits, forward = scheduler.limits, compute.forward
    budget, chance = draw.choice([7, 33, 128, 512]), draw.choice([0, 0.1])

    def faulty(batch):
        fails = len({rows.sequence.owner for rows in batch.rows}) > 1 and draw.random() < chance
        if fails and draw.random() < 0.5:
            raise MemoryError
        hidden = forward(batch)
        if fails:
            raise MemoryError
        return hidden

    compute.forward = faulty
    scheduler.limits = dataclasses.replace(limits, max_tokens=budget, max_beside=budget)
    yield
    compute.forward, scheduler.limits = forward, limits


async def test_answers_are_the_same_bits_in_all_circumstances(model):
    (model, rounds), draw = model, random.Random(7)
    engine, requests = model.engine, Requests(model, draw)
    ours = [requests.of(kind, place) for kind in requests.kinds for place in range(3)]
    alone = [await requests.answer(request) for request in ours]
    for _ in range(rounds):
        company = [requests.of(draw.choice(requests.kinds), place) for place in range(draw.randrange(6))]
        order = list(range(len(ours)))
        draw.shuffle(order)
        with circumstances(engine, draw):
            answers = await asyncio.gather(
                *(requests.answer(ours[place], waits=draw.random() < 0.3) for place in order),
                *map(requests.answer, company),
            )
            await until(lambda: engine.num_open == 0)
        for place, answer in zip(order, answers, strict=False):
            assert answer == alone[place], ours[place]
    assert engine.num_blocks_used == 0
