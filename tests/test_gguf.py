"""Conversion of GGUF files and the cache of prepared folders."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pyruntime.errors import ModelLoadError
from pyruntime.model.cache import cache_root, prepare_once, prepared_folder
from pyruntime.model.gguf import ensure_converted, is_gguf

WIDTH, HEADS, FEED, LAYERS = 64, 4, 96, 2
WORDS = ["<unk>", "<s>", "</s>", "▁", *"abcdefgh", "▁a", "▁b", "ab", "cd"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRUNTIME_CACHE_DIR", str(tmp_path / "cache"))


def quiet(_: str) -> None:
    pass


def write_llama(path: Path) -> None:
    """A small Llama with random weights, its matrices in Q8_0, and a SentencePiece-like vocabulary."""
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([-float(i) for i in range(len(WORDS))])
    writer.add_token_types([2, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = draw.normal(0, 0.05, (rows, columns)).astype(np.float32)
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    matrix("token_embd.weight", len(WORDS), WIDTH)
    matrix("output.weight", len(WORDS), WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{part}.weight", WIDTH, WIDTH)
        matrix(f"blk.{layer}.ffn_gate.weight", FEED, WIDTH)
        matrix(f"blk.{layer}.ffn_up.weight", FEED, WIDTH)
        matrix(f"blk.{layer}.ffn_down.weight", WIDTH, FEED)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_file_computes_what_the_file_computes(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_llama(file)
    said: list[str] = []
    folder = ensure_converted(file, said.append)
    assert any("step 2 of 3" in line for line in said)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    original.load_state_dict({name: value.bfloat16().float() for name, value in original.state_dict().items()})
    ids = torch.tensor([[1, 4, 5, 6, 12, 13]])
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=1e-6)
    assert next(iter(AutoModelForCausalLM.from_pretrained(folder).parameters())).dtype == torch.bfloat16
    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert ours("ab cd a").input_ids == theirs("ab cd a").input_ids


def test_a_file_is_converted_once_whatever_it_is_called(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "copy.bin"
    write_llama(first)
    folder = ensure_converted(first, quiet)
    second.write_bytes(first.read_bytes())
    said: list[str] = []
    assert ensure_converted(second, said.append) == folder
    assert said == []


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("GGU")
    assert not is_gguf(file)
    assert not is_gguf(tmp_path)
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        ensure_converted(file, quiet)


def test_an_unknown_architecture_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(file, "no-such-architecture")
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"odd\.gguf cannot be converted"):
        ensure_converted(file, quiet)
    assert [path for path in (cache_root() / "models").iterdir() if path.is_dir()] == []


def test_a_failed_preparation_leaves_nothing_and_can_be_repeated() -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        prepare_once("key", fail, quiet)
    assert prepared_folder("key") is None
    folder = prepare_once("key", lambda f: (f / "whole").touch(), quiet)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert prepared_folder("key") == folder


def test_what_a_killed_preparation_left_is_removed() -> None:
    leftover = cache_root() / "models" / ".key.tmp-dead"
    leftover.mkdir(parents=True)
    prepare_once("key", lambda f: (f / "whole").touch(), quiet)
    assert not leftover.exists()


def test_threads_that_ask_at_once_share_one_preparation() -> None:
    made: list[Path] = []
    both = threading.Barrier(2, timeout=30)

    def ask() -> None:
        both.wait()
        prepare_once("key", made.append, quiet)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1


HOLDER = """
from pyruntime.model.cache import prepare_once

def make(folder):
    print("started", flush=True)
    input()
    (folder / "theirs").touch()

prepare_once("key", make, print)
"""


def test_another_process_is_waited_for() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=Path(__file__).parent.parent, **pipes) as holder:
        assert holder.stdout.readline() == "started\n"
        said: list[str] = []

        def let_the_other_go_on(text: str) -> None:
            said.append(text)
            holder.stdin.write("\n")
            holder.stdin.flush()

        # The wait is announced before it begins, which is when the other process may go on.
        folder = prepare_once("key", lambda f: (f / "ours").touch(), let_the_other_go_on)
        assert [path.name for path in folder.iterdir()] == ["theirs"]
        assert len(said) == 1


def test_the_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYRUNTIME_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/pyruntime")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/anna")
    assert cache_root() == Path("/home/anna/.cache/pyruntime")
