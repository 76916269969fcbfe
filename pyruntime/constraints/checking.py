"""The process that compiles a constraint first: what goes wrong in it harms nobody.

Run as a program. Reads one JSON string a line, a grammar, and answers each with a line of JSON: the compiler's
complaint, or an empty string. It ends itself when a grammar takes more processor time or memory than is allowed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

OUT_OF_MEMORY = 77  # exit status


def main() -> None:
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    from llguidance import LLMatcher

    from pyruntime.constraints.grammar import limits

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        grammar = json.loads(line)
        # SIGPROF ends a process that does not handle it, also in the middle of native code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            problem = LLMatcher.validate_grammar(grammar, limits=limits())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_warning = problem.startswith("WARNING")
        print(json.dumps("" if is_warning else problem), flush=True)


if __name__ == "__main__":
    main()
