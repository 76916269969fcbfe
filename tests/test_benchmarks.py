"""The benchmark's work stays the same, and its ratios point the right way."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
FIGURES = [
    {"engine": "pyruntime", "task": "embed", "request_size": 32, "texts_per_s": 300.0},
    {"engine": "pyruntime", "task": "embed", "request_size": 512, "texts_per_s": 400.0},
    {"engine": "pyruntime", "task": "embed_one", "p50_ms": 2.0, "p99_ms": 3.0},
    {"engine": "pyruntime", "task": "generate", "streams": 16, "tokens_per_s": 100.0},
    {"engine": "peer", "task": "embed", "texts_per_s": 200.0},
    {"engine": "peer", "task": "embed_one", "p50_ms": 5.0},
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


def test_ratios_above_one_are_faster(room: None) -> None:
    report = module("report")
    rows = report.compared(FIGURES)
    assert rows["embed", "texts_per_s"] == {"pyruntime": 400.0, "peer": 200.0}
    assert report.ratio(400.0, 200.0, "texts_per_s") == 2.0
    assert report.ratio(2.0, 5.0, "p50_ms") == 2.5


def test_the_table_shows_every_figure_and_leaves_out_no_peer(room: None) -> None:
    text = module("report").table(FIGURES)
    embed = next(line for line in text.splitlines() if line.startswith("embed ") and "200.0" in line)
    assert embed.split() == ["embed", "texts_per_s", "400.0", "200.0", "2.00"]
    generate = [line for line in text.splitlines() if line.startswith("generate, 16 streams")]
    assert generate[-1].split()[-2:] == ["-", "-"]
