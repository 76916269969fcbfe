"""Block accounting: references, limits, and the errors of misuse."""

import pytest

from pyruntime.scheduler.blocks import BlockPool, OutOfBlocks


def test_blocks_go_out_and_come_back():
    pool = BlockPool(num_blocks=4, block_size=16)
    taken = pool.allocate(3)
    assert len(set(taken)) == 3
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.release(taken)
    assert pool.num_free == 4


def test_shared_block_stays_until_its_last_reference_goes():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0


def test_too_many_takes_nothing():
    pool = BlockPool(2, 4)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert pool.num_free == 2


def test_misuse_is_an_error():
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="released twice"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([1])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens, blocks):
    assert BlockPool(8, 16).blocks_for(tokens) == blocks
