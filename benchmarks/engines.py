"""The engines that a run compares, each in processes of its own that wait until they are asked.

Ours is a server, asked over gRPC; a peer is a runner of benchmarks/peers/, asked over a pipe. Between two questions a
peer is stopped (``SIGSTOP``), so that it cannot take processor time from the one that is measured; the server only
waits, and what it spends meanwhile is part of the figures (``idle_cpu_s``).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
import psutil
from aims import US, precision
from answers import answers
from meter import Meter
from server_process import ROOT, started_server
from workload import STREAMS, UNITS, Workload

HERE = Path(__file__).resolve().parent
EMBED = ("embed", "embed_one")
ENCODER = (*EMBED, "rerank")
GENERATE = tuple(f"generate_{streams}" for streams in STREAMS)
#: Tasks and precisions of the engines that live at the same time: all at once would not fit into 24 GB.
GROUPS = (
    (ENCODER, ("float32", "bfloat16", "int8")),
    (("score",), ("bfloat16",)),
    (GENERATE, ("bfloat16",)),
    (GENERATE, ("int8",)),
)


@dataclass(frozen=True)
class Kind:
    """One process: which engine, in which precision, for which tasks. ``options`` are the server's, of ours alone;
    ``beside``: the kinds of ours that this peer is compared with.

    What guessing tokens ahead gains depends on how much continuations repeat themselves, and greedy ones of this
    workload do. So Generate is measured with and without: ours guesses unless it is told not to (``-no-drafts``), peers
    where they are told to (``-drafts``).
    """

    engine: str
    dtype: str
    tasks: tuple[str, ...]
    options: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


_INT8 = ("--dtype", "bfloat16", "--quantization", "int8")
_OFF = ("--speculation", "off")
OURS = (
    Kind(US, "bfloat16", tuple(UNITS), ("--dtype", "bfloat16")),
    Kind(US, "bfloat16-no-drafts", GENERATE, ("--dtype", "bfloat16", *_OFF)),
    Kind(US, "float32", EMBED, ("--dtype", "float32")),
    Kind(US, "int8", (*ENCODER, *GENERATE), _INT8),
    Kind(US, "int8-no-drafts", ("generate_1",), (*_INT8, *_OFF)),
)
_BFLOAT16 = ("bfloat16", "bfloat16-no-drafts", "int8")
PEERS = (
    *(Kind("vllm", "bfloat16", tasks, beside=_BFLOAT16) for tasks in (EMBED, ("rerank",), ("score",), GENERATE)),
    Kind("vllm", "bfloat16-drafts", GENERATE, beside=("bfloat16",)),
    Kind("vllm", "float32", EMBED, beside=("float32",)),
    Kind("openvino", "bfloat16", ENCODER, beside=_BFLOAT16),
    Kind("openvino", "float32", EMBED, beside=("float32",)),
    # The nearest that it has to bfloat16 on a CPU.
    Kind("onnxruntime", "float32", ENCODER, beside=("float32", *_BFLOAT16)),
    Kind("onnxruntime", "int8", EMBED, beside=("int8",)),
    Kind("sentence-transformers", "bfloat16", ENCODER, beside=_BFLOAT16),
    Kind("sentence-transformers", "float32", EMBED, beside=("float32",)),
    Kind("llama.cpp", "bfloat16", ("generate_1",), beside=("bfloat16", "bfloat16-no-drafts")),
    Kind("llama.cpp", "bfloat16-drafts", ("generate_1",), beside=("bfloat16",)),
    Kind("llama.cpp", "int8", ("generate_1",), beside=("int8", "int8-no-drafts")),
    Kind("llama.cpp", "int8-drafts", ("generate_1",), beside=("int8",)),
)


class Server:
    """Ours. ``runner`` keeps one event loop for the whole run, as grpc.aio wants it."""

    def __init__(self, kind: Kind, address: str, pid: int, work: Workload, runner: asyncio.Runner) -> None:
        self.kind, self.pid, self.version = kind, pid, _commit()
        self.settings: dict[str, Any] = {}
        self._address, self._work, self._runner = address, work, runner

    def answers(self, task: str) -> list[Any]:
        """The answers; of ``embed`` also finds the better size of a request, as peers find that of a batch."""

        async def asked() -> list[Any]:
            async with load.connect(self._address) as channel:
                if task == "embed":
                    tried = [await load.embed(channel, self._work, size, 1) for size in load.REQUEST_SIZES]
                    self.settings["request_size"] = max(tried, key=lambda each: each["texts_per_s"])["request_size"]
                return await answers(channel, self._work, task)

        return self._runner.run(asked())

    def measure(self, task: str, passes: int) -> dict[str, float]:
        """The best figure of ``task``; processor time and peak memory of the server over all passes of it."""

        async def asked() -> load.Figures:
            async with load.connect(self._address) as channel:
                if task == "embed":
                    return await load.embed(channel, self._work, self.settings["request_size"], passes)
                return await load.measure_task(channel, self._work, task, passes)

        with Meter(self.pid) as meter:
            figures = self._runner.run(asked())
        # Each has a pass to warm up, ``embed_one`` some calls.
        amount = self._work.amount(task)
        spent_on = amount * passes + load.WARM_CALLS if task == "embed_one" else amount * (passes + 1)
        numbers = {key: float(value) for key, value in figures.items() if isinstance(value, float)}
        return {**numbers, "cpu_ms_each": meter.cpu_s * 1e3 / spent_on, "peak_mb": meter.peak_rss_mb}


def _commit() -> str:
    """Of this checkout, ``-dirty`` where it has been edited since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


class Peer:
    """A runner of benchmarks/peers/, stopped while it is not asked."""

    def __init__(self, kind: Kind, process: subprocess.Popen[str]) -> None:
        self.kind, self.pid, self._process = kind, process.pid, process
        hello = self._read()
        self.version, self.settings = hello["version"], hello["settings"]

    def answers(self, task: str) -> list[Any]:
        return list(self._ask({"do": "answers", "task": task})["answers"])

    def measure(self, task: str, passes: int) -> dict[str, float]:
        return self._ask({"do": "measure", "task": task, "passes": passes})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        os.kill(self.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.kind.engine} in {self.kind.dtype} ended with code {self._process.wait()}")
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # it has stopped, or ended
        return dict(json.loads(line))


Engine = Server | Peer


@contextmanager
def running(
    kind: Kind, tasks: list[str], models: dict[str, str], share: int, work: Workload, log: Path, runner: asyncio.Runner
) -> Iterator[Engine]:
    """An engine, loaded, for those of its tasks that are in ``tasks``. What it prints goes to ``log``."""
    if kind.engine == US:
        names = (
            {load.ENCODER: "encoder", load.RERANKER: "reranker"} if tasks[0] in ENCODER else {load.DECODER: "decoder"}
        )
        served = [option for name, key in names.items() for option in ("--model", f"{name}={models[key]}")]
        with started_server(log, *served, *kind.options) as (address, pid):
            yield Server(kind, address, pid, work, runner)
        return
    python = ROOT / "build" / "peers" / kind.engine / "bin" / "python"
    script = HERE / "peers" / f"{kind.engine.replace('-', '_').replace('.', '')}_peer.py"
    job = json.dumps({"models": models, "dtype": kind.dtype, "tasks": tasks, "share": share})
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, script, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
    try:
        yield Peer(kind, process)
    except RuntimeError as error:
        raise RuntimeError(f"{error}:\n{log.read_text(errors='replace')[-3000:]}") from error
    finally:
        process.kill()
        process.wait()


def cpu_seconds(engines: list[Engine]) -> float:
    """Processor time that these have spent so far, for the check that whoever waits does not work."""
    times = [psutil.Process(engine.pid).cpu_times() for engine in engines]
    return sum(each.user + each.system for each in times)


def groups(dtypes: list[str], peers: list[str], only: list[str]) -> list[list[tuple[Kind, list[str]]]]:
    """The processes of a run, each with its tasks, by the group that it lives in: ours in ``dtypes``, and those of
    ``peers`` that these are compared with.
    """
    kinds = [kind for kind in OURS if kind.dtype in dtypes]
    kinds += [kind for kind in PEERS if kind.engine in peers and set(kind.beside) & set(dtypes)]
    found = []
    for tasks, precisions in GROUPS:
        members = [(kind, [task for task in kind.tasks if task in tasks and task in only]) for kind in kinds]
        found.append([(kind, due) for kind, due in members if due and precision(kind.dtype) in precisions])
    return [members for members in found if members]
