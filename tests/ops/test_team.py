"""The threads that kernels share: what a product gives does not depend on who takes part in it."""

from __future__ import annotations

import os
import threading
import warnings

import torch

from pyruntime.ops.linear import linear_rows

ROUNDS = 40


def _product(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 64, generator=generator), torch.randn(512, 64, generator=generator)


def test_threads_that_compute_at_once_get_what_one_alone_gets() -> None:
    products = [_product(seed) for seed in range(4)]
    wanted = [linear_rows(*each) for each in products]
    found: list[list[torch.Tensor]] = [[] for _ in products]

    def compute(place: int) -> None:
        found[place] = [linear_rows(*products[place]) for _ in range(ROUNDS)]

    threads = [threading.Thread(target=compute, args=(place,)) for place in range(len(products))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, expected in zip(found, wanted, strict=True):
        assert len(rows) == ROUNDS and all(torch.equal(each, expected) for each in rows)


def test_more_threads_than_before_and_fewer() -> None:
    x, w = _product(0)
    expected = linear_rows(x, w)
    for count in (1, 3, 2, 5, 1, 2):
        torch.set_num_threads(count)
        assert all(torch.equal(linear_rows(x, w), expected) for _ in range(ROUNDS))


def test_a_forked_process_computes_without_the_threads_of_its_parent() -> None:
    x, w = _product(1)
    expected = linear_rows(x, w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later versions of Python warn of forks beside threads
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear_rows(x, w), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
