"""Compiles constraints in threads of its own and keeps what it found out about the last ones of each model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

from pyruntime.constraints.grammar import ConstraintText, check_size
from pyruntime.constraints.guard import COMPILE_CPU_S, Guard
from pyruntime.constraints.lanes import Lane, Verdict
from pyruntime.constraints.matcher import Constraint
from pyruntime.constraints.vocabulary import Vocabulary, known_vocabulary, vocabulary_of
from pyruntime.errors import InvalidField
from pyruntime.tokenization import Tokenizer

NUM_THREADS = 2
# What is compiled within this processor time does not wait for what takes longer. Schemas of 50 kB take a third of it.
QUICK_CPU_S = 0.2
MOST_CACHED = 256

_Verdicts = OrderedDict[ConstraintText, Verdict]


class ConstraintCompiler:
    """Thread-safe. What is known of a text goes with its model's tokenizer.

    The verdict on a text is kept. What follows a text while it grows is made for each request anew: the library shares
    it between all copies, and with it the limit of its states, which one request must not use up for another.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._quick = Lane("quick", num_threads, lambda: Guard(QUICK_CPU_S), expected_s=0.01)
        self._slow = Lane("slow", 1, Guard, expected_s=COMPILE_CPU_S / 2)
        self._lock = threading.Lock()
        self._verdicts: WeakKeyDictionary[Tokenizer, _Verdicts] = WeakKeyDictionary()
        self.num_compiled = 0

    async def compile(
        self, text: ConstraintText, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
    ) -> Constraint:
        """A constraint for one request.

        Raises ``InvalidField`` with what is wrong with the text, ``CapabilityMissing`` for models that cannot be
        constrained, ``Overloaded`` when too many texts wait.
        """
        check_size(text)
        vocabulary = known_vocabulary(tokenizer, vocab_size, eos_ids)
        if vocabulary is None:
            vocabulary = await self._quick.run(vocabulary_of, tokenizer, vocab_size, eos_ids)
        verdict = self._known(text, tokenizer) or await self._find_out(text, tokenizer, vocabulary)
        if verdict.problem:
            raise InvalidField(text.field, verdict.problem)
        lane = self._slow if verdict.compile_s > QUICK_CPU_S else self._quick
        try:
            return await lane.run(Constraint, verdict.grammar, text.field, vocabulary)
        except InvalidField as error:
            self._keep(text, tokenizer, Verdict(problem=error.problem))
            raise

    def close(self) -> None:
        """Nothing is compiled any more; what is being compiled ends with its process or on its own."""
        self._quick.close()
        self._slow.close()

    @property
    def num_jobs(self) -> int:
        """Texts that are being compiled or wait for it."""
        return self._quick.num_jobs + self._slow.num_jobs

    async def _find_out(self, text: ConstraintText, tokenizer: Tokenizer, vocabulary: Vocabulary) -> Verdict:
        question, key = _question(text, vocabulary), (id(vocabulary), text)
        verdict = await self._quick.check(key, question)
        if verdict.took_too_long:
            verdict = await self._slow.check(key, question)
        if verdict.took_too_long:
            verdict = Verdict(problem=f"takes more than {COMPILE_CPU_S:g} s to compile")
        self._keep(text, tokenizer, verdict)
        return verdict

    def _known(self, text: ConstraintText, tokenizer: Tokenizer) -> Verdict | None:
        with self._lock:
            known = self._verdicts.get(tokenizer)
            if known is None or text not in known:
                return None
            known.move_to_end(text)
            return known[text]

    def _keep(self, text: ConstraintText, tokenizer: Tokenizer, verdict: Verdict) -> None:
        with self._lock:
            known = self._verdicts.setdefault(tokenizer, OrderedDict())
            self.num_compiled += text not in known
            known[text] = verdict
            while len(known) > MOST_CACHED:
                known.popitem(last=False)


def _question(text: ConstraintText, vocabulary: Vocabulary) -> dict[str, Any]:
    """What ``checking.checked`` is asked. Only grammars can name tokens."""
    only = text.texts[0]
    names = vocabulary.special_names if text.kind == "grammar" and "<" in only else {}
    num_ids = vocabulary.num_ids if text.kind == "grammar" and "<[" in only else 0
    mentioned = [name for name in names if name in only]
    return {"kind": text.kind, "texts": list(text.texts), "special_names": mentioned, "num_ids": num_ids}
