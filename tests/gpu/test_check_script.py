"""tools/gpu_check.py where there is no GPU: it says so, its tables and failures are right, and models are compared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pyruntime.model import fused_layers
from tests.models.architectures import DECODERS, ENCODERS, factory_of, save

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SCRIPT = TOOLS / "gpu_check.py"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_check() -> ModuleType:
    return tool("gpu_check")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_refuses_without_a_gpu() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a machine with an NVIDIA GPU" in done.stdout
    assert "CPU build" in done.stdout or "finds no GPU" in done.stdout


def test_unknown_step_is_refused(gpu_check: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no step is called 'dance'; there are build, tests"):
        gpu_check.main(["--only", "tests,dance"])


def test_table_aligns_its_columns(gpu_check: ModuleType) -> None:
    assert gpu_check.table([["name", "us"], ["pool", 3.5], ["a longer one", None]]).splitlines() == [
        "name          us",
        "------------  ---",
        "pool          3.5",
        "a longer one",
    ]


def test_a_failing_step_is_reported_with_its_output(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(limit: float) -> tuple[str, list]:
        return gpu_check.run([sys.executable, "-c", "print('bad news'); raise SystemExit(3)"], limit), []

    monkeypatch.setitem(gpu_check.STEPS, "tests", failing)
    monkeypatch.setitem(gpu_check.STEPS, "bench", lambda limit: ("fine", [{"name": "copy", "gb_s": 4000}]))
    outcomes = [gpu_check.run_step("tests"), gpu_check.run_step("bench")]
    assert [o.passed for o in outcomes] == [False, True]
    text = gpu_check.report(outcomes)
    assert "FAILED" in text and "ended with 3" in text and "bad news" in text and "4000" in text


def test_main_prints_one_json_line(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setitem(gpu_check.STEPS, "bench", lambda limit: ("fine", [{"name": "copy", "gb_s": 4000}]))
    assert gpu_check.main(["--only", "bench", "--json", str(tmp_path / "out.json")]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["passed"] and line["steps"][0]["figures"] == [{"name": "copy", "gb_s": 4000}]
    assert json.loads((tmp_path / "out.json").read_text()) == line


def test_a_step_that_takes_too_long_fails(gpu_check: ModuleType) -> None:
    with pytest.raises(gpu_check.StepFailed, match="took more than"):
        gpu_check.run([sys.executable, "-c", "import time; time.sleep(9)"], 0.3)


@pytest.mark.parametrize(
    ("model_type", "fields"), [("gemma3_text", DECODERS["gemma3_text"]), ("bert", ENCODERS["bert"])]
)
def test_whole_models_are_compared(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, model_type, fields, factory_of(model_type, is_decoder=model_type in DECODERS))
    figures = tool("gpu_runner").compare(tmp_path, "float32", "cpu")  # the CPU in the place of the device
    assert figures["least_cosine_with_cpu"] == 1.0 and figures["tokens_per_s"] > 0
    assert figures.get("next_tokens_differ", 0) == 0


def test_captured_steps_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama", DECODERS["llama"], factory_of("llama", is_decoder=True))
    graphs = tool("gpu_graphs")
    # As on a GPU: the CPU's body of fused layers reads positions on the host.
    monkeypatch.setattr(fused_layers, "put_stack", lambda *_: False)
    monkeypatch.setattr(graphs, "STREAMS", (1, 3))
    monkeypatch.setattr(graphs, "TIMED", 3)
    capture, *lines = graphs.measure(tmp_path, "float32", "cpu")
    assert capture["graphs"] == 3  # of 1, 2 and 3 rows, and tables as wide as the model reads
    assert [line["streams"] for line in lines] == [1, 3]
    for line in lines:
        assert line["bit_equal"] and line["least_cosine"] == 1.0
        assert line["us_eager"] > 0 and line["us_captured"] > 0 and line["launches_captured"] == 0


def test_models_that_do_not_generate_have_no_such_steps(gpu_check: ModuleType, tmp_path: Path) -> None:
    for name, expected in (("GPT2LMHeadModel", True), ("LlamaForCausalLM", True), ("BertModel", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert gpu_check.generates(str(tmp_path)) is expected
