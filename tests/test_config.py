"""Settings: precedence of their sources, and what a mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pyruntime.config import OPTIONS, Settings
from pyruntime.config_values import Share
from pyruntime.types import Task


def load(*argv: str, **environ: str) -> Settings:
    return Settings.load(argv, environ)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        load(*argv, **environ)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    settings = load()
    assert (settings.port, settings.host, settings.models, settings.demo) == (50051, "127.0.0.1", {}, False)
    assert settings.kv_cache_bytes == 2**30
    assert settings.max_message_bytes == 64 * 2**20
    assert (settings.max_text_bytes, settings.max_request_text_bytes) == (2**20, 8 * 2**20)
    assert (settings.max_labels_per_request, settings.max_scores_per_request) == (4096, 2**20)
    assert not settings.deterministic


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nthreads: 1\nkv_block_size: 1\nmodels: {a: /x}\n")
    environ = {"PYRUNTIME_CONFIG": str(file), "PYRUNTIME_PORT": "2", "PYRUNTIME_THREADS": "2"}
    settings = load("--port", "3", **environ)
    assert (settings.port, settings.threads, settings.kv_block_size, settings.max_batch_tokens) == (3, 2, 1, 2048)
    assert settings.models == {"a": "/x"}


def test_the_config_flag_beats_the_config_variable(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("port: 1\n")
    (tmp_path / "b.yaml").write_text("port: 2\n")
    settings = load("--config", str(tmp_path / "b.yaml"), PYRUNTIME_CONFIG=str(tmp_path / "a.yaml"))
    assert settings.port == 2


def test_models_repeat_as_flags_and_join_in_the_environment() -> None:
    expected = {"a": "/x", "b": "org/name"}
    assert load("--model", "a=/x", "--model", "b=org/name").models == expected
    assert load(PYRUNTIME_MODELS="a=/x, b=org/name").models == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1048576", 2**20), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("2gb", 2 * 10**9), ("2048kib", 2**21)],
)
def test_byte_forms(text: str, expected: int) -> None:
    assert load("--kv-cache-bytes", text).kv_cache_bytes == expected


def test_the_cache_takes_bytes_or_a_share_of_free_memory(tmp_path: Path) -> None:
    assert load("--kv-cache-bytes", " 37.5% ").kv_cache_bytes == Share(37.5)
    file = tmp_path / "settings.yaml"
    file.write_text("kv_cache_bytes: 40%\n")
    assert load("--config", str(file)).kv_cache_bytes == Share(40)
    assert load("--config", str(file), PYRUNTIME_KV_CACHE_BYTES="2GiB").kv_cache_bytes == 2**31
    assert str(Share(40)) == "40%"


def test_task_shares_leave_out_what_has_the_weight_one(tmp_path: Path) -> None:
    expected = {Task.GENERATE: 2, Task.EMBED: 0.5, Task.SCORE: 1, Task.CLASSIFY: 1}
    assert load("--task-shares", "generate=2, embed=0.5").task_shares == expected
    file = tmp_path / "settings.yaml"
    file.write_text("task_shares: {generate: 2, embed: 0.5}\n")
    assert load("--config", str(file)).task_shares == expected
    assert load().task_shares == dict.fromkeys(Task, 1)


@pytest.mark.parametrize("address", ["", "127.0.0.1:50052", "[::1]:0", "localhost:1", "unix:/run/admin.sock"])
def test_admin_addresses(address: str) -> None:
    assert load("--admin-address", address).admin_address == address


def test_booleans_both_ways() -> None:
    assert load("--demo").demo
    assert not load("--no-self-check").self_check
    assert not load("--no-demo", PYRUNTIME_DEMO="true").demo


def test_an_empty_variable_counts_as_unset() -> None:
    assert load(PYRUNTIME_PORT="").port == 50051


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--port", "99999"], ["--port", "'99999'", "the command line", "0 to 65535"]),
        (["--dtype", "int3"], ["--dtype", "'int3'", "one of auto, float32, bfloat16"]),
        (["--speculation", "on"], ["--speculation", "'on'", "one of auto, off"]),
        (["--max-draft-tokens", "0"], ["--max-draft-tokens", "'0'", "1 to 64"]),
        (["--max-draft-rows", "1"], ["--max-draft-rows", "'1'", "2 to 1024"]),
        (["--device", "tpu"], ["--device", "'tpu'", "cpu, cuda or cuda:INDEX"]),
        (["--kv-cache-bytes", "12 parsecs"], ["--kv-cache-bytes", "'12 parsecs'", "1048576 to"]),
        (["--kv-cache-bytes", "96%"], ["--kv-cache-bytes", "'96%'", "1% to 95%"]),
        (["--kv-cache-bytes", "nan%"], ["--kv-cache-bytes", "'nan%'", "1% to 95%"]),
        (["--kv-cache-bytes", "x%"], ["--kv-cache-bytes", "'x%'", "1% to 95%"]),
        (["--kv-cache-bytes", "1KiB"], ["--kv-cache-bytes", "'1KiB'", "1048576 to"]),
        (["--task-shares", "generate=0"], ["--task-shares", "'generate=0'", "0.01 to 100"]),
        (["--task-shares", "embed=nan"], ["--task-shares", "0.01 to 100"]),
        (["--task-shares", "embed"], ["--task-shares", "TASK=WEIGHT"]),
        (["--task-shares", "paint=1"], ["--task-shares", "generate, embed, score and classify"]),
        (["--task-shares", "embed=1,embed=2"], ["--task-shares", "each once"]),
        (["--admin-address", "50052"], ["--admin-address", "'50052'", "HOST:PORT, unix:PATH"]),
        (["--admin-address", ":50052"], ["--admin-address", "HOST:PORT"]),
        (["--admin-address", "127.0.0.1:65536"], ["--admin-address", "0 to 65535"]),
        (["--admin-address", "127.0.0.1: 1"], ["--admin-address", "0 to 65535"]),
        (["--kv-cache-bytes", "9" * 400], ["--kv-cache-bytes", "1048576 to"]),
        (["--max-message-bytes", "9" * 400 + "GiB"], ["--max-message-bytes", "1024 to"]),
        (["--max-text-bytes", "٣"], ["--max-text-bytes", "1 to"]),
        (["--model", "nameonly"], ["--model", "nameonly", "NAME=PATH"]),
        (["--model", "a=/x", "--model", "a=/y"], ["--model", "each name once"]),
        (["--threads", "two"], ["--threads", "'two'", "0 to 4096"]),
        (["--host", ""], ["--host", "not empty"]),
        (["--otlp-endpoint", "collector:4317"], ["--otlp-endpoint", "'collector:4317'", "http://HOST:PORT"]),
        (["--prot", "1"], ["--prot"]),
    ],
)
def test_a_bad_flag_is_named_with_value_and_range(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: list[str]
) -> None:
    message = refusal(capsys, *argv)
    assert all(part in message for part in says), message


def test_a_bad_variable_names_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, PYRUNTIME_DEMO="maybe")
    assert "--demo: 'maybe' from the environment" in message
    assert "true or false" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("porte: 1\n", "unknown keys porte"),
        ("port: -1\n", "--port: -1 from the file"),
        ("- port\n", "must be a mapping"),
        ("a: [\n", "cannot be read"),
        ("port: 2020-13-45\n", "cannot be read"),
        ("port: " + "9" * 5000 + "\n", "cannot be read"),
        ("[" * 10000, "cannot be read"),
        ("models: [a]\n", "NAME=PATH"),
        ("models: {'': /x}\n", "NAME=PATH"),
        ("port: true\n", "--port: True from the file"),
        ("drain_grace_s: yes\n", "--drain-grace-s: True"),
        ("max_text_bytes: on\n", "--max-text-bytes: True"),
        ("threads: false\n", "--threads: False"),
        ("host: true\n", "--host: True"),
        ("kv_cache_bytes: true\n", "--kv-cache-bytes: True"),
        ("kv_cache_bytes: [1]\n", "--kv-cache-bytes: 1"),
        ("task_shares: [1]\n", "TASK=WEIGHT"),
        ("task_shares: {embed: yes}\n", "TASK=WEIGHT"),
    ],
)
def test_a_bad_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert says in refusal(capsys, "--config", str(file))


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read" in refusal(capsys, "--config", str(tmp_path / "none.yaml"))


def test_every_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--port", "-1", PYRUNTIME_THREADS="x")
    assert "--port" in message
    assert "--threads" in message


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load().port = 1  # type: ignore[misc]


def test_help_lists_every_option_with_default_range_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert ("--model " if name == "models" else f"--{name.replace('_', '-')}") in text
        assert f"[env PYRUNTIME_{name.upper()}]" in text
        assert OPTIONS.allowed(name) in text
        assert f"[default {OPTIONS.default(name)}]" in text


@pytest.mark.parametrize(
    ("given", "taken"),
    [("[::1]", "::1"), ("::", "::"), ("fe80::1%eth0", "fe80::1%eth0"), ("node-7.example", "node-7.example")],
)
def test_hosts_have_no_port_and_brackets_do_not_matter(given: str, taken: str) -> None:
    settings = load("--host", given, "--metrics-host", given)
    assert (settings.host, settings.metrics_host) == (taken, taken)


@pytest.mark.parametrize("host", ["", " ", "localhost:50051", "[::1]:50051", "http://here", "a b", "unix:", "[]", ":"])
def test_hosts_that_are_none(capsys: pytest.CaptureFixture[str], host: str) -> None:
    for option in ("--host", "--metrics-host"):
        assert "a host or address without a port" in refusal(capsys, option, host)


def test_only_the_main_listener_may_be_a_unix_socket(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("--host", "unix:/run/a.sock").host == "unix:/run/a.sock"
    assert "--metrics-host" in refusal(capsys, "--metrics-host", "unix:/run/a.sock")


def test_options_that_do_nothing_are_told() -> None:
    assert load("--demo", "--port", "0").idle() == []
    assert load("--metrics-host", "0.0.0.0", "--metrics-port", "0", "--keepalive-timeout-s", "5").idle() == []
    argv = ["--metrics-host", "0.0.0.0", "--admin-token-file", "t", "--speculation", "off", "--max-draft-rows", "4"]
    assert load(*argv, PYRUNTIME_KEEPALIVE_S="0", PYRUNTIME_KEEPALIVE_TIMEOUT_S="9").idle() == [
        "--metrics-host does nothing without --metrics-port",
        "--admin-token-file does nothing without --admin-address",
        "--keepalive-timeout-s does nothing without --keepalive-s above 0",
        "--max-draft-rows does nothing without --speculation auto",
    ]
    assert load("--health", "token").idle() == ["--health does nothing without --token-file"]
    tls = ["--tls-certificate", "c", "--tls-key", "k", "--host", "unix:/s"]
    assert load(*tls).idle() == ["--tls-certificate does nothing without a listener that is no Unix socket"]
    assert load(*tls, "--admin-address", "0.0.0.0:1").idle() == []


def test_a_mistake_is_not_buried_in_a_list_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refusal(capsys, "--port", "x").splitlines()) == 2
