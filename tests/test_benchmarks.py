"""The benchmark's work stays the same, and its ratios point the right way."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def figure(engine: str, dtype: str, task: str, unit: str, *rounds: float) -> dict[str, object]:
    costs = {"cpu_ms_each": [1.0] * len(rounds), "peak_mb": [100.0] * len(rounds)}
    return {"engine": engine, "dtype": dtype, "task": task, "unit": unit, "rounds": list(rounds), **costs}


FIGURES = [
    figure("pyruntime", "bfloat16", "embed", "texts_per_s", 400.0, 380.0, 420.0),
    figure("vllm", "bfloat16", "embed", "texts_per_s", 200.0, 190.0, 250.0),
    figure("onnxruntime", "float32", "embed", "texts_per_s", 210.0, 180.0, 100.0),
    figure("onnxruntime", "int8", "embed", "texts_per_s", 900.0, 900.0, 900.0),
    figure("pyruntime", "bfloat16", "embed_one", "p50_ms", 2.0, 2.2, 1.9),
    figure("openvino", "bfloat16", "embed_one", "p50_ms", 1.0, 1.1, 1.0),
    figure("pyruntime", "bfloat16-no-drafts", "generate_16", "tokens_per_s", 100.0, 100.0, 100.0),
    figure("pyruntime", "bfloat16", "generate_16", "tokens_per_s", 300.0, 300.0, 300.0),
    figure("vllm", "bfloat16", "generate_16", "tokens_per_s", 80.0, 50.0, 80.0),
    figure("vllm", "bfloat16-drafts", "generate_16", "tokens_per_s", 120.0, 120.0, 120.0),
]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_the_workload_is_the_one_that_older_figures_refer_to(room: None) -> None:
    work = module("workload").make_workload()
    digest = hashlib.sha256(json.dumps(asdict(work)).encode()).hexdigest()
    assert digest == "97dd8f668cdb2c4c12981f4a5a19f5961b239e1ee28f408329b6728038172c6c"
    assert len(work.embed_texts) == 512
    assert len(work.score_prefix.split()) == 400


def test_an_aim_is_held_against_the_best_peer_that_keeps_the_precision(room: None) -> None:
    found = {(each["task"], each["dtype"]): each for each in module("aims").verdicts(FIGURES)}
    embed, one = found["embed", "bfloat16"], found["embed_one", "bfloat16"]
    assert (embed["against"], embed["ratio"], embed["met"]) == ("vllm bfloat16", 2.0, True)
    assert embed["rounds"] == [2.0, 2.0, 1.68]
    assert (one["against"], one["ratio"], one["met"]) == ("openvino bfloat16", 0.5, False)


def test_drafts_are_held_against_drafts_and_none_against_none(room: None) -> None:
    found = {each["dtype"]: each for each in module("aims").verdicts(FIGURES) if each["task"] == "generate_16"}
    assert {dtype: (each["against"], each["ratio"]) for dtype, each in found.items()} == {
        "bfloat16-no-drafts": ("vllm bfloat16", 1.25),
        "bfloat16": ("vllm bfloat16-drafts", 2.5),
    }


def test_an_aim_without_a_peer_is_not_decided(room: None) -> None:
    assert module("aims").verdicts(FIGURES[:1]) == []


def test_the_tables_show_every_figure_with_its_spread(room: None) -> None:
    text = module("report").tables(FIGURES, module("aims").verdicts(FIGURES))
    line = next(line for line in text.splitlines() if line.startswith("embed ") and "pyruntime" in line)
    assert line.split() == ["embed", "pyruntime", "bfloat16", "400", "380", "420", "texts_per_s", "1.000", "100"]
    assert sum("MISSED" in line for line in text.splitlines()) == 2


@pytest.mark.parametrize(
    ("engine", "dtype", "task", "distance"),
    [
        ("pyruntime", "bfloat16-no-drafts", "generate_1", 0.25),
        ("pyruntime", "int8", "embed", 0.005),
        ("pyruntime", "float32", "embed", 1e-5),
        ("vllm", "bfloat16", "score", 2.0),
    ],
)
def test_answers_may_be_as_far_from_float32_as_their_precision_allows(
    room: None, engine: str, dtype: str, task: str, distance: float
) -> None:
    assert module("aims").allowed(engine, dtype, task) == distance


def test_every_aim_has_processes_of_one_group_that_decide_it(room: None) -> None:
    engines, aims = module("engines"), module("aims")
    for aim in aims.AIMS:
        found = engines.groups([aim.dtype], list(aim.peers), [aim.task])
        assert [{kind.engine for kind, _ in members} for members in found] == [{"pyruntime", *aim.peers}]


def test_a_part_of_a_run_starts_only_what_it_needs(room: None) -> None:
    (members,) = module("engines").groups(["bfloat16", "int8"], ["vllm", "llama.cpp"], ["score"])
    assert [(kind.engine, kind.dtype, tasks) for kind, tasks in members] == [
        ("pyruntime", "bfloat16", ["score"]),
        ("vllm", "bfloat16", ["score"]),
    ]


def test_every_process_has_its_turn_at_every_task_of_its_own(room: None) -> None:
    engines = module("engines")
    kinds = [*engines.OURS, *engines.PEERS]
    names = list({kind.engine for kind in kinds})
    found = engines.groups([kind.dtype for kind in engines.OURS], names, list(module("workload").UNITS))
    placed = [(kind, task) for members in found for kind, tasks in members for task in tasks]
    assert len(placed) == len(set(placed))
    assert set(placed) == {(kind, task) for kind in kinds for task in kind.tasks}


@pytest.fixture
def peer(room: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    """A runner that answers from the standard library alone, behind the pipe that all peers' runners use."""
    engines = module("engines")
    script = tmp_path / "peers" / "toy_peer.py"
    script.parent.mkdir()
    script.write_text(TOY_PEER)
    python = tmp_path / "build" / "peers" / "toy" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(engines, "HERE", script.parent.parent)
    kind = engines.Kind("toy", "float32", ("embed", "embed_one"))
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    with engines.running(kind, ["embed"], {}, 64, None, tmp_path / "log", None) as running:
        yield running


TOY_PEER = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
from common import Task, load_job, serve
job = load_job()
print("chatter that must not reach the pipe")
serve("toy", "1", job, {{"embed": Task(lambda number: [number] * len(job.work.embed_texts))}}, {{"batch": 8}})
"""


def test_a_peer_answers_over_its_pipe_and_is_stopped_in_between(peer: Any) -> None:
    assert (peer.version, peer.settings) == ("1", {"batch": 8})
    assert peer.answers("embed") == [0] * 8
    figures = peer.measure("embed", 2)
    assert figures["texts_per_s"] > 0
    assert psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED
