"""server.py in a process of its own, with a model that continues every prompt with the alphabet, at a steady pace.

python -m tests.service.paced_server OPTION…: those of server.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

STEP_S = 0.005
MOST_AT_ONCE = 50


def load(name: str, *_: Any) -> Any:
    from pyruntime.engine import Engine
    from pyruntime.registry import GenerationDefaults, ServedModel
    from pyruntime.scheduler.blocks import BlockPool
    from pyruntime.scheduler.scheduler import Scheduler
    from pyruntime.types import Capability
    from tests.fakes import EOS, byte_tokenizer, fake_model
    from tests.service.test_flow import CONTEXT, Alphabet

    class Paced(Alphabet):
        def forward(self, batch: Any) -> None:
            time.sleep(STEP_S)

    info = fake_model(name, {Capability.GENERATE, Capability.EMBED}, context_length=CONTEXT).info
    model = Paced()
    engine = Engine(info, Scheduler(BlockPool(4000, 16), 2048, MOST_AT_ONCE), model, model, model)
    return ServedModel(info, engine, byte_tokenizer(), GenerationDefaults(eos_token_ids=frozenset({EOS})))


@dataclass
class Running:
    process: subprocess.Popen[str]
    address: str
    admin: str


@contextmanager
def running(*options: str) -> Iterator[Running]:
    """Until the block ends, or the process by itself."""
    command = [sys.executable, "-m", "tests.service.paced_server", "--model", "m=anywhere", "--port", "0"]
    command += ["--admin-address", "127.0.0.1:0", "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while not (match := re.search(r"SERVING on (\S+): m\n.*AdminService on (\S+)\n", said)):
            line = process.stdout.readline()
            assert line, f"it has ended: {said}"
            said += line
        yield Running(process, match[1], match[2])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    sys.modules["pyruntime.serving"] = SimpleNamespace(load_served_model=load)  # type: ignore[assignment]
    import server

    sys.exit(server.main())
