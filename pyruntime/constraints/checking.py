"""The process that compiles a constraint first: what goes wrong in it harms nobody.

Run as a program. Reads a constraint a line, as JSON, and answers each with a line of JSON: the grammar to compile, or
what is wrong. It ends itself when one takes more processor time or memory than is allowed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from functools import lru_cache
from typing import Any

OUT_OF_MEMORY = 77  # exit status
NICENESS = 10  # whoever generates goes first

_EOS_ID = 256


def main() -> None:
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    os.nice(NICENESS)
    # Before the limit of memory, which is not for the libraries.
    from llguidance import LLMatcher  # noqa: F401

    from pyruntime.constraints import grammar  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        asked = json.loads(line)
        # SIGPROF ends a process that does not handle it, also in the middle of native code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = checked(**asked)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def checked(kind: str, texts: list[str], special_names: list[str], num_ids: int) -> dict[str, Any]:
    """``grammar``, the first form that compiles and has a first mask, or the ``problem`` of the first one.

    ``compile_s``: the processor time that compiling the grammar took.

    Single bytes stand for the model's tokens. ``special_names``: those of its special tokens that the text mentions.
    """
    from pyruntime.constraints.grammar import ConstraintText, grammars_of
    from pyruntime.errors import InvalidField

    problems = []
    try:
        for form in grammars_of(ConstraintText(kind, tuple(texts))):
            tokens, start = _byte_tokens(tuple(special_names), num_ids), time.process_time()
            problem = _problem(form, tokens)
            if not problem:
                return {"grammar": form, "compile_s": time.process_time() - start}
            problems.append(problem)
    except InvalidField as error:
        problems.append(error.problem)
    return {"problem": problems[0]}


def _problem(form: str, tokens: Any) -> str:
    import numpy as np
    from llguidance import LLMatcher

    from pyruntime.constraints.grammar import NOT_TO_BE_FOLLOWED, limits, shorten

    matcher = LLMatcher(tokens, form, limits=limits(), log_level=0)
    if matcher.is_error():
        return f"does not compile: {shorten(matcher.get_error())}"
    mask = np.zeros((tokens.vocab_size + 31) // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return f"{NOT_TO_BE_FOLLOWED}: {shorten(matcher.get_error())}" if matcher.is_error() else ""


@lru_cache(maxsize=8)
def _byte_tokens(special_names: tuple[str, ...], num_ids: int) -> Any:
    """The bytes, an end of sequence, the special tokens, and ids without text up to ``num_ids``."""
    from llguidance import LLTokenizer

    class Bytes:
        is_tokenizer_wrapper = True
        bos_token_id = None
        eos_token_id = _EOS_ID

        def __init__(self) -> None:
            names = [name.encode() for name in special_names]
            # No text of a constraint has the byte 0xFF, which marks special tokens.
            self.tokens = [bytes([byte]) for byte in range(255)] + [b"", b"<|end of sequence|>", *names]
            self.tokens += [b""] * (num_ids - len(self.tokens))
            self.special_token_ids = [_EOS_ID, *range(_EOS_ID + 1, _EOS_ID + 1 + len(names))]

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    return LLTokenizer(Bytes(), eos_token=_EOS_ID)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
