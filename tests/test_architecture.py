"""The rules that keep the rooms apart, read from the sources themselves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pyruntime"
MOST_LINES = 300

SOURCES = sorted(
    path
    for path in [*PACKAGE.rglob("*.py"), ROOT / "server.py"]
    if path.is_file() and PACKAGE / "v1" not in path.parents
)

# What each room may import of the project; config, config_values, errors and types are open to all.
MAY_IMPORT: dict[str, set[str]] = {
    "config": {"config_options", "config_values"},
    "config_options": {"config_values"},
    "config_values": set(),
    "errors": set(),
    "types": set(),
    "step_thread": set(),
    "detokenization": set(),
    "control_tokens": set(),
    "tokenization": {"control_tokens", "detokenization"},
    "ops": {"_C", "_C_cuda"},
    "machine": set(),
    "model": {"ops", "machine"},
    "placing": set(),
    "heads": {"ops", "model", "placing"},
    "scheduler": {"placing"},
    "stats": set(),
    "jobs": {"scheduler", "stats"},
    "constraints": {"tokenization", "detokenization"},
    "overload": set(),
    "admission": {"overload"},
    "deadlines": {"jobs"},
    "step_runner": {"scheduler"},
    "step_loop": {"admission", "deadlines", "step_runner", "scheduler", "jobs", "stats", "step_thread"},
    "engine": {"admission", "step_loop", "step_runner", "scheduler", "jobs", "stats", "step_thread"},
    "rerank_template": {"tokenization"},
    "rerank_folder": {"rerank_template", "tokenization"},
    "registry": {"engine", "tokenization", "rerank_template"},
    "self_check": {"model", "scheduler"},
    "model_info": {"model"},
    "serving": {
        "model_info",
        "registry",
        "engine",
        "constraints",
        "step_thread",
        "machine",
        "self_check",
        "tokenization",
        "rerank_folder",
        "rerank_template",
        "scheduler",
        "model",
        "heads",
        "ops",
    },
    "lifecycle": {"registry", "serving", "model"},
    "telemetry": {"registry", "engine", "scheduler", "stats"},
    "service": {
        "registry",
        "lifecycle",
        "engine",
        "jobs",
        "constraints",
        "telemetry",
        "control_tokens",
        "tokenization",
        "rerank_template",
        "v1",
    },
    "client": {"v1"},
    "server": {
        "service",
        "telemetry",
        "lifecycle",
        "machine",
        "registry",
        "serving",
        "model",
        "engine",
        "tokenization",
    },
}
OPEN_TO_ALL = {"config", "config_values", "errors", "types", ""}
GRPC_ROOMS = {"service", "client", "server"}
GRPC_MODULES = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "pyruntime.v1"}
TORCH_FREE_ROOMS = {"service", "scheduler", "registry", "client", "config", "errors", "engine", "jobs", "step_thread"}
TORCH_FREE_ROOMS |= {
    "lifecycle",
    "constraints",
    "machine",
    "admission",
    "overload",
    "deadlines",
    "step_runner",
    "step_loop",
    "stats",
    "telemetry",
}


def room(path: Path) -> str:
    """The first part of the path below the package, without suffix; ``server`` for server.py."""
    if path == ROOT / "server.py":
        return "server"
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports at run time, in functions too; not those for type checkers alone."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(path, node)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return found


def absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def is_under(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=identifier)
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    assert here in MAY_IMPORT or here == "", f"{path} is a new room: say in MAY_IMPORT what it may import"
    reached = {name.split(".")[1] if "." in name else "" for name in imports(path) if is_under(name, {"pyruntime"})}
    names = {entry for entry in reached if (PACKAGE / entry).is_dir() or (PACKAGE / f"{entry}.py").is_file()}
    names |= reached & {"v1", "_C", "_C_cuda"}
    forbidden = names - MAY_IMPORT.get(here, set()) - OPEN_TO_ALL - {here}
    assert not forbidden, f"{here} must not import {sorted(forbidden)}"


@pytest.mark.parametrize("path", SOURCES, ids=identifier)
def test_only_the_doors_know_grpc(path: Path) -> None:
    if room(path) in GRPC_ROOMS:
        return
    seen = {name for name in imports(path) if is_under(name, GRPC_MODULES)}
    assert not seen, f"{path} imports {sorted(seen)}"


@pytest.mark.parametrize("path", [p for p in SOURCES if room(p) != "telemetry"], ids=identifier)
def test_only_telemetry_knows_who_reads_its_numbers(path: Path) -> None:
    seen = {name for name in imports(path) if is_under(name, {"prometheus_client", "opentelemetry"})}
    assert not seen, f"{path} imports {sorted(seen)}"


@pytest.mark.parametrize("path", [p for p in SOURCES if room(p) in TORCH_FREE_ROOMS], ids=identifier)
def test_service_and_scheduler_do_not_know_torch(path: Path) -> None:
    seen = {name for name in imports(path) if is_under(name, {"torch", "transformers"})}
    assert not seen, f"{path} imports {sorted(seen)}"


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").rglob("*.cuh")), ids=identifier)
def test_device_code_does_not_know_torch(path: Path) -> None:
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)
    assert not [name for name in included if name.startswith(("torch/", "ATen/", "c10/"))]


def hand_written() -> list[Path]:
    folders = [PACKAGE, *(ROOT / name for name in ("csrc", "proto", "tests", "benchmarks", "tools"))]
    suffixes = {".py", ".cpp", ".h", ".cu", ".cuh"}
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    return sorted(path for path in files if PACKAGE / "v1" not in path.parents)


@pytest.mark.parametrize("path", hand_written(), ids=identifier)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    """The reader of imports finds the forms that people write, and leaves out those for type checkers."""
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport grpc.aio\n"
        "if TYPE_CHECKING:\n    import numpy\nelse:\n    import yaml\n"
        "def f():\n    from torch import nn\n    import google.rpc as r\n"
    )
    found = imports(file)
    assert {"grpc.aio", "torch", "torch.nn", "google.rpc", "yaml"} <= found
    assert "numpy" not in found
    assert is_under("grpc.aio", GRPC_MODULES)
    assert not is_under("grpcx", GRPC_MODULES)
