"""One command for a machine with a GPU: builds, then checks and measures every CUDA kernel there.

    python tools/gpu_check.py [--only build,tests,…] [--json FILE]

Needs what such a machine has: nvcc, g++, cmake, ninja, and a Python with a CUDA build of torch, transformers, pydantic,
pybind11 and pytest; installs nothing. PYRUNTIME_GPU_MODELS: folders of models, joined by colons, for the steps "runner"
and "graphs". Prints a table and, as the last line, one JSON object. Exit status: 0 all good, 1 something failed, 2 this
machine cannot run it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
PYTEST = [sys.executable, "-m", "pytest", "-c", "tests/gpu/machine.ini", "--rootdir", ".", "-q"]
SANITIZERS = ("memcheck", "racecheck", "synccheck")


class StepFailed(Exception):
    """What a step found, or the end of what its command printed."""


@dataclass
class Outcome:
    step: str
    passed: bool
    seconds: float
    summary: str
    figures: list[dict[str, object]] = field(default_factory=list)


def run(command: Sequence[str | Path], timeout: float, **environment: str) -> str:
    """The command's output, standard error included; raises StepFailed with its tail."""
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{command[0]} took more than {timeout:.0f} s") from error
    if done.returncode != 0:
        raise StepFailed(f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def build(limit: float) -> tuple[str, list[dict[str, object]]]:
    """CMake alone: the protobuf code and its generator are not needed for the kernels."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    options = ["-DPYRUNTIME_CUDA=1", f"-DPython_EXECUTABLE={sys.executable}", f"-DPYRUNTIME_VERSION={version}"]
    run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD, *options], limit)
    run(["cmake", "--build", BUILD], limit)
    run(["cmake", "--install", BUILD, "--prefix", BUILD / "install", "--component", "python"], limit)
    libraries = sorted((BUILD / "install" / "pyruntime").glob("*.so"))
    for library in libraries:
        fresh = ROOT / "pyruntime" / (library.name + ".new")
        shutil.copy2(library, fresh)
        fresh.replace(ROOT / "pyruntime" / library.name)
    return ", ".join(library.name for library in libraries), []


def tests(limit: float) -> tuple[str, list[dict[str, object]]]:
    """tests/gpu, torch.library.opcheck among them; a skipped test is a failure here."""
    lines = run([*PYTEST, "-m", "gpu", "tests/gpu"], limit).strip().splitlines()
    if "skipped" in lines[-1]:
        raise StepFailed("tests were skipped:\n" + "\n".join(lines[-5:]))
    return lines[-1].strip("= "), []


def sanitizer(limit: float) -> tuple[str, list[dict[str, object]]]:
    """compute-sanitizer over one small call of every op, each allocation on its own."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise StepFailed("compute-sanitizer was not found")
    small = [sys.executable, ROOT / "tools" / "gpu_small.py"]
    for tool in SANITIZERS:
        run(
            [program, "--tool", tool, "--error-exitcode", "9", *small], limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
        )  # fmt: skip
    return f"{', '.join(SANITIZERS)}: no error", []


def bench(limit: float) -> tuple[str, list[dict[str, object]]]:
    figures = json.loads(run([sys.executable, ROOT / "tools" / "gpu_bench.py"], limit).strip().splitlines()[-1])
    return f"{len(figures) - 1} kernels against a copy of {figures[0]['gb_s']} GB/s", figures


def parity(limit: float) -> tuple[str, list[dict[str, object]]]:
    return run([sys.executable, ROOT / "tools" / "gpu_parity.py"], limit).strip().splitlines()[-1], []


def runner(limit: float) -> tuple[str, list[dict[str, object]]]:
    """Whole models by the runner that serves them, those of PYRUNTIME_GPU_MODELS or two with random weights."""
    figures = figures_of("gpu_runner.py", own_models(), limit)
    return f"{len(figures)} runs: rows and next tokens as on the CPU", figures


def graphs(limit: float) -> tuple[str, list[dict[str, object]]]:
    """Captured decode steps against eager ones, of those models of PYRUNTIME_GPU_MODELS that generate or of a random
    one."""
    figures = figures_of("gpu_graphs.py", [folder for folder in own_models() if generates(folder)], limit)
    timed = [figure for figure in figures if "us_eager" in figure]
    if not timed:
        return "no model whose steps can be captured", figures
    ratios = [float(str(figure["us_eager"])) / float(str(figure["us_captured"])) for figure in timed]
    return (
        f"{len(timed)} runs: rows as without graphs, steps {min(ratios):.2f} to {max(ratios):.2f} times as fast",
        figures,
    )


def own_models() -> list[str]:
    return [folder for folder in os.environ.get("PYRUNTIME_GPU_MODELS", "").split(":") if folder]


def generates(folder: str) -> bool:
    architectures = json.loads((Path(folder) / "config.json").read_text()).get("architectures") or [""]
    return str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel"))


def figures_of(tool: str, folders: Sequence[str], limit: float) -> list[dict[str, object]]:
    chosen = [part for folder in folders for part in ("--model", folder)]
    found: list[dict[str, object]] = json.loads(
        run([sys.executable, ROOT / "tools" / tool, *chosen], limit).splitlines()[-1]
    )
    return found


STEPS: dict[str, Callable[[float], tuple[str, list[dict[str, object]]]]] = {
    "build": build,
    "tests": tests,
    "sanitizer": sanitizer,
    "bench": bench,
    "parity": parity,
    "runner": runner,
    "graphs": graphs,
}
LIMITS = {
    "build": 200.0,
    "tests": 120.0,
    "sanitizer": 60.0,
    "bench": 120.0,
    "parity": 60.0,
    "runner": 120.0,
    "graphs": 120.0,
}


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; the first row is the heading."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def report(outcomes: Sequence[Outcome]) -> str:
    """The tables for a reader."""
    rows: list[list[object]] = [["step", "result", "seconds", "what"]]
    rows += [
        [o.step, "passed" if o.passed else "FAILED", f"{o.seconds:.1f}", o.summary.splitlines()[0]] for o in outcomes
    ]
    parts = [table(rows)]
    for outcome in outcomes:
        if outcome.figures:
            keys = list(dict.fromkeys(key for figure in outcome.figures for key in figure))
            parts.append(table([keys, *([figure.get(key) for key in keys] for figure in outcome.figures)]))
        if not outcome.passed:
            parts.append(f"{outcome.step}: {outcome.summary}")
    return "\n\n".join(parts)


def run_step(name: str) -> Outcome:
    begin = time.monotonic()
    try:
        summary, figures = STEPS[name](LIMITS[name])
        passed = True
    except (StepFailed, OSError) as error:
        summary, figures, passed = str(error), [], False
    return Outcome(name, passed, round(time.monotonic() - begin, 1), summary, figures)


def missing() -> str | None:
    """Why this machine cannot run the check, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    absent = [name for name in ("cmake", "ninja", "nvcc", "g++") if shutil.which(name) is None]
    if "nvcc" in absent and Path("/usr/local/cuda/bin/nvcc").exists():
        absent.remove("nvcc")
    return f"not on PATH: {', '.join(absent)}" if absent else None


def chosen_steps(only: str | None) -> list[str]:
    names = list(STEPS) if only is None else only.split(",")
    for name in names:
        if name not in STEPS:
            raise SystemExit(f"gpu_check: no step is called {name!r}; there are {', '.join(STEPS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds, checks and measures the CUDA kernels on this machine's GPU.")
    parser.add_argument("--only", metavar="STEP,…", help=f"some of the steps {', '.join(STEPS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON object there")
    options = parser.parse_args(arguments)
    names = chosen_steps(options.only)
    reason = missing()
    if reason is not None:
        print(f"gpu_check: this needs a machine with an NVIDIA GPU, nvcc and a CUDA build of torch: {reason}")
        return 2
    import torch

    outcomes: list[Outcome] = []
    for name in names:
        outcomes.append(run_step(name))
        print(f"{name}: {'passed' if outcomes[-1].passed else 'FAILED'} in {outcomes[-1].seconds} s", flush=True)
        if name == "build" and not outcomes[-1].passed:
            break
    passed = all(o.passed for o in outcomes) and len(outcomes) == len(names)
    facts = {"passed": passed, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    line = json.dumps({**facts, "steps": [asdict(o) for o in outcomes]})
    print("\n" + report(outcomes) + "\n\n" + line)
    if options.json is not None:
        options.json.write_text(line + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
