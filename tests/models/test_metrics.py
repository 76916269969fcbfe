"""Metrics of real models against what their answers say, over a real channel."""

import grpc
import pytest

from pyruntime.config import Settings
from pyruntime.telemetry import site
from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)
from tests.models.lent import serving
from tests.models.texts import text
from tests.telemetry.help import Page

GEMMA, MINILM = "gemma-3-270m", "all-minilm-l6-v2"


@pytest.fixture
async def stack(served, monkeypatch):
    """A channel and a metrics port. The models are the session's, so that counters do not begin at 0."""
    monkeypatch.setattr(site, "REUSE_FACTOR", 0)
    settings = Settings(port=0, metrics_port=0)
    models = {name: served(name, "float32") for name in (GEMMA, MINILM)}
    async with serving(models, settings) as (server, registry):
        with site.status_page(settings, registry, server.calls, lambda: server.is_ready) as address:
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield channel, Page(address)


def generate_request(i):
    stop = generate_pb2.Stop(max_new_tokens=6, ignore_eos=True)
    return generate_pb2.GenerateRequest(model=GEMMA, text=text(7000 + i, 40), stop=stop)


async def test_counters_equal_what_the_answers_say(stack):
    channel, page = stack
    generate, embed = generate_pb2_grpc.GenerateServiceStub(channel), embed_pb2_grpc.EmbedServiceStub(channel)
    score = score_pb2_grpc.ScoreServiceStub(channel)
    before = await page.metrics()
    # The second of each pair finds what the first has left in the prefix cache.
    generated = [await generate.Generate(generate_request(i // 2)) for i in range(4)]
    texts = [common_pb2.Input(text=text(7100 + i, 5 + i)) for i in range(3)]
    embedded = [await embed.Embed(embed_pb2.EmbedRequest(model=MINILM, inputs=texts)) for _ in range(2)]
    items = [common_pb2.Input(text=" " + text(7200 + i, 4)) for i in range(2)]
    query = common_pb2.Input(text=text(7300, 20))
    labels = [" yes", " no"]
    await score.Score(score_pb2.ScoreRequest(model=GEMMA, query=query, items=items, labels=labels))
    after = await page.metrics()

    def grew(*key):
        return after[key] - before.get(key, 0)

    assert grew("pyruntime_prompt_tokens_total", GEMMA, "generate") == sum(g.usage.prompt_tokens for g in generated)
    hits = sum(g.usage.cached_tokens for g in generated)
    assert grew("pyruntime_prefix_hit_tokens_total", GEMMA, "generate") == hits > 0
    assert grew("pyruntime_completion_tokens_total", GEMMA) == sum(g.usage.completion_tokens for g in generated) == 24
    assert grew("pyruntime_inter_token_seconds_count", GEMMA) == 4 * 5
    assert grew("pyruntime_time_to_first_token_seconds_count", GEMMA) == 4
    assert grew("pyruntime_prompt_tokens_total", MINILM, "embed") == sum(e.usage.prompt_tokens for e in embedded)
    assert grew("pyruntime_inference_seconds_count", MINILM, "embed") == 2
    assert grew("pyruntime_inference_seconds_count", GEMMA, "score") == 1
    # What the engine timed lies within what gRPC saw, and the first token within its request.
    method = "pyruntime.v1.GenerateService/Generate"
    whole = grew("pyruntime_inference_seconds_sum", GEMMA, "generate")
    assert 0 < grew("pyruntime_time_to_first_token_seconds_sum", GEMMA) < whole
    assert whole < grew("pyruntime_request_seconds_sum", method)
    assert after["pyruntime_model_weights_bytes", GEMMA] > 5e8
    assert after["pyruntime_model_cache_bytes", GEMMA] > 5e8
    assert after["pyruntime_model_cache_bytes", MINILM] == 0
