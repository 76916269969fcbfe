"""A real model whose every layer has a sliding window, on a cache that gives blocks back while its texts run."""

import math
import random

import pytest
import torch

from pyruntime.model.kv_cache import KVCache
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.self_check import run_batched
from tests.models.architectures import DECODERS, eager_body, eager_rows, factory_of, load, save

WINDOW, BLOCK, NUM_BLOCKS = 20, 16, 30


class PoisonedRunner(ModelRunner):
    """Before each step every key and value of a block that nobody refers to becomes NaN."""

    def __init__(self, loaded, cache, pool):
        super().__init__(loaded, cache)
        self.kept, self.pool, self.num_poisoned = cache, pool, 0

    def forward(self, batch):
        unused = torch.tensor([block for block, count in enumerate(self.pool._references) if count == 0])
        self.num_poisoned += len(unused)
        for stored in (*self.kept.keys.values(), *self.kept.values.values()):
            stored[unused] = math.nan
        return super().forward(batch)


@pytest.mark.parametrize("budget", [24, 200])
def test_rows_equal_eager_though_what_left_the_window_is_poison(tmp_path, budget):
    save(tmp_path, "mistral", DECODERS["mistral"] | {"sliding_window": WINDOW}, factory_of("mistral", True))
    loaded = load(tmp_path)
    assert {traits.window for traits in loaded.layers.values()} == {WINDOW}
    pool = BlockPool(NUM_BLOCKS, BLOCK)
    cache = KVCache(loaded.cache_shapes, NUM_BLOCKS, BLOCK, loaded.dtype, "cpu")
    runner = PoisonedRunner(loaded, cache, pool)
    scheduler = Scheduler(pool, budget, 8, prefix_cache=PrefixCache(pool), window=WINDOW)
    generator = random.Random(3)
    texts = [[generator.randrange(3, 190) for _ in range(length)] for length in (250, 1, 130, 64, 65, 201)]
    rows = run_batched(runner, scheduler, BatchBuilder(BLOCK, "cpu"), texts)
    body = eager_body(tmp_path, factory_of("mistral", True))
    with torch.inference_mode():
        for own, ids in zip(rows, texts, strict=True):
            torch.testing.assert_close(own, eager_rows(body, ids), rtol=1e-4, atol=1e-4)
    assert runner.num_poisoned > 0
    assert pool.num_used == 0
