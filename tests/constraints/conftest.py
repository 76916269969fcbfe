"""One compiler for all, over the tokenizer of bytes."""

from __future__ import annotations

import pytest

from pyruntime.constraints.compiler import ConstraintCompiler
from pyruntime.constraints.grammar import ConstraintText
from tests.fakes import EOS, byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def compiler():
    """For many tests, since its processes take a moment to start; texts that one has compiled stay known."""
    compiler = ConstraintCompiler()
    yield compiler
    compiler.close()


@pytest.fixture
def compile_(compiler, tokenizer):
    """compile_("regex", "a+") → Constraint over ids 0 to 259, where 257 ends."""

    async def of(kind, *texts, vocab_size=260):
        return await compiler.compile(ConstraintText(kind, texts), tokenizer, vocab_size, frozenset({EOS}))

    return of
