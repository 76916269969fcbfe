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
import threading
from pathlib import Path
from typing import Any

from pyruntime.constraints.checking import OUT_OF_MEMORY
from pyruntime.errors import RequestCancelled

COMPILE_CPU_S = 3.0
COMPILE_MEMORY_BYTES = 2**29

_ROOT = Path(__file__).resolve().parent.parent.parent
_TOO_MUCH = {OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL, -signal.SIGBUS}


class TookTooLong(Exception):
    """The process ended at its limit of processor time."""


class TookTooMuch(Exception):
    """The process ended at its limit of memory, or its stack."""


class Guard:
    """One such process, started when it is needed and again when it has ended. ``ask`` is for one thread at a time."""

    def __init__(self, cpu_s: float = COMPILE_CPU_S, memory_bytes: int = COMPILE_MEMORY_BYTES) -> None:
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer of ``checking.checked``.

        Raises ``TookTooLong``, ``TookTooMuch``, ``RequestCancelled`` after ``stop``, and ``RuntimeError`` when the
        process cannot run.
        """
        try:
            return self._asked(self._running(), question)
        finally:
            with self._lock:
                self._is_stopped = False

    def _asked(self, process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer.endswith("\n"):
            return dict(json.loads(answer))
        code = process.wait()
        self.close()
        if self._is_stopped:
            raise RequestCancelled("nobody waits for the constraint any more")
        if code == -signal.SIGPROF:
            raise TookTooLong
        if code in _TOO_MUCH:
            raise TookTooMuch
        raise RuntimeError(f"the process that checks constraints ended with {code}")

    def stop(self) -> None:
        """End what is being asked, from any thread."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:  # it was ended from outside
            self.close()
        with self._lock:
            if self._is_stopped:
                raise RequestCancelled("nobody waits for the constraint any more")
            self._process = self._process or self._start()
            return self._process

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pyruntime.constraints.checking", str(self.cpu_s), str(self.memory_bytes)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # an interrupt at the server's terminal is the server's to handle
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
