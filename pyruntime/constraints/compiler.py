"""Compiles constraints in threads of its own and keeps the last ones of each model."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLTokenizer

from pyruntime.constraints.grammar import ConstraintText, grammar_of, limits, shorten
from pyruntime.constraints.guard import Guard
from pyruntime.constraints.matcher import Constraint
from pyruntime.errors import CapabilityMissing, InvalidField
from pyruntime.tokenization import Tokenizer

NUM_THREADS = 2
MOST_CACHED = 64


class _Vocabulary:
    """A model's tokens as the library sees them, and what was compiled for them, errors as well."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(each for each in eos_ids if each < vocab_size)
        self.compiled: OrderedDict[ConstraintText, Constraint | InvalidField] = OrderedDict()
        if not self.eos_ids:
            raise CapabilityMissing("constraints need a model with an end-of-sequence token; this one has none")
        # Ids that only one of tokenizer and model has are in neither's masks: they spell nothing, or are cut off.
        width = max(vocab_size, tokenizer.vocab_size)
        try:
            self.tokens = LLTokenizer(tokenizer.definition(), n_vocab=width, eos_token=sorted(self.eos_ids))
        except ValueError as error:
            raise CapabilityMissing(f"constraints do not work with this tokenizer: {shorten(str(error))}") from error


class ConstraintCompiler:
    """Thread-safe. A compiled constraint goes with its model's tokenizer: when that is let go, so is the constraint."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="constrain")
        self._guards: queue.SimpleQueue[Guard] = queue.SimpleQueue()
        for _ in range(num_threads):
            self._guards.put(Guard())
        self._lock = threading.Lock()
        self._building = threading.Lock()  # held for seconds, so never by an event loop
        self._vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
        self._is_closed = False
        self.num_compiled = 0

    async def compile(
        self, text: ConstraintText, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
    ) -> Constraint:
        """Raises ``InvalidField`` with what is wrong with the text, ``CapabilityMissing`` for models that cannot."""
        found = self._cached(text, tokenizer)
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._pool, self._compile, text, tokenizer, vocab_size, eos_ids)
        if isinstance(found, InvalidField):
            raise InvalidField(found.field, found.problem)
        return found

    def close(self) -> None:
        """Nothing is compiled any more; what is being compiled ends with its process or on its own."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._guards.get_nowait().close()

    def _cached(self, text: ConstraintText, tokenizer: Tokenizer) -> Constraint | InvalidField | None:
        with self._lock:
            vocabulary = self._vocabularies.get(tokenizer)
            if vocabulary is None or text not in vocabulary.compiled:
                return None
            vocabulary.compiled.move_to_end(text)
            return vocabulary.compiled[text]

    def _compile(
        self, text: ConstraintText, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
    ) -> Constraint | InvalidField:
        found = self._cached(text, tokenizer)
        if found is not None:  # another request has compiled it meanwhile
            return found
        with self._building:
            vocabulary = self._vocabularies.get(tokenizer)
            if vocabulary is None:
                vocabulary = _Vocabulary(tokenizer, vocab_size, eos_ids)
                with self._lock:
                    self._vocabularies[tokenizer] = vocabulary
        try:
            found = self._compiled(text, vocabulary)
        except InvalidField as error:
            found = InvalidField(error.field, error.problem)
        with self._lock:
            vocabulary.compiled[text] = found
            while len(vocabulary.compiled) > MOST_CACHED:
                vocabulary.compiled.popitem(last=False)
        return found

    def _compiled(self, text: ConstraintText, vocabulary: _Vocabulary) -> Constraint:
        self.num_compiled += 1
        grammar = grammar_of(text)
        guard = self._guards.get()
        try:
            problem = guard.complaint(grammar)
        finally:
            if self._is_closed:
                guard.close()
            else:
                self._guards.put(guard)
        root = None if problem else LLMatcher(vocabulary.tokens, grammar, limits=limits(), log_level=0)
        problem = problem or (root.get_error() if root is not None else "")
        if problem or root is None:
            raise InvalidField(text.field, f"does not compile: {shorten(problem)}")
        return Constraint(root, text.field, vocabulary.vocab_size, vocabulary.eos_ids)
