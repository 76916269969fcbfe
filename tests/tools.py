"""Programs that some tests need and a machine may lack."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

# Set by .ci/run, which has installed them: there a test that cannot run has failed.
REQUIRE = "PYRUNTIME_REQUIRE_TOOLS"


def need(program: str, how_to_get: str) -> str:
    """The path of ``program``: beside this Python first, then on PATH and where Debian keeps servers.

    Skips the test where there is none, with ``how_to_get`` as the reason; fails it where tools are required.
    """
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        missing(f"{program} is not installed: {how_to_get}")
    return found


def missing(reason: str) -> NoReturn:
    """Skip, or fail where tools are required."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason} ({REQUIRE} is set)")
    pytest.skip(reason)
