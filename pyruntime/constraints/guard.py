"""Compiles constraints in a process of its own first, which a hostile one may take down.

The library bounds its steps one by one, not their sum, and nothing can interrupt it: a schema of a few thousand bytes
can make it ask the same bounded question many times. The process has a limit of processor time, so that the verdict
does not depend on how busy the machine is, and one of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from pyruntime.constraints.checking import OUT_OF_MEMORY

COMPILE_CPU_S = 3.0
COMPILE_MEMORY_BYTES = 2**30

_ROOT = Path(__file__).resolve().parent.parent.parent
_TOO_MUCH = {OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL, -signal.SIGBUS}


class Guard:
    """One such process, started when it is needed and again when it has ended. For one thread at a time."""

    def __init__(self, cpu_s: float = COMPILE_CPU_S, memory_bytes: int = COMPILE_MEMORY_BYTES) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[str] | None = None

    def complaint(self, grammar: str) -> str:
        """Why ``grammar`` does not compile, empty when it does. Raises ``RuntimeError`` when the process cannot run."""
        if self._process is not None and self._process.poll() is not None:  # it was ended from outside
            self.close()
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer.endswith("\n"):
            return str(json.loads(answer))
        code = process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return f"takes more than {self._cpu_s:g} s to compile"
        if code in _TOO_MUCH:
            return f"takes more than {self._memory_bytes >> 20} MiB of memory, or too deep a stack, to compile"
        raise RuntimeError(f"the process that checks constraints ended with {code}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pyruntime.constraints.checking", str(self._cpu_s), str(self._memory_bytes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # an interrupt at the server's terminal is the server's to handle
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        return self._process
