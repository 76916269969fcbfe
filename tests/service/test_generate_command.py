"""``pyruntime generate``: every option reaches the request, and what comes back is shown."""

from __future__ import annotations

import json

import pytest

from pyruntime.client import arguments, cli
from pyruntime.client.messages import CHAT_OPTIONS
from pyruntime.client.options import GenerateOptions
from tests.fakes import BOS, MARK, play
from tests.service.conftest import Stack
from tests.service.test_cli import run
from tests.service.test_generate_chunks import PROMPT, with_logprobs

SET = [
    *["--temperature", "0.5", "--top-p", "0.25", "--top-k", "7", "--min-p", "0.125", "--seed", "9", "--n", "2"],
    *["--repetition-penalty", "1.5", "--frequency-penalty", "-0.5", "--presence-penalty", "2"],
    *["--logit-bias", "3=8", "--logit-bias", "9=-4.5", "--priority", "-3", "--request-id", "mine"],
    *["--max-new-tokens", "20", "--min-new-tokens", "1", "--stop", "E", "--stop", "\nF", "--stop-token-id", str(MARK)],
    *["--ignore-eos", "--include-stop-in-text", "--chunk-tokens", "5"],
]


async def test_options_reach_the_engine(stack: Stack, capsys):
    stack.engine.next_stream = play("okE", n=2)
    assert await run(stack, "generate", *SET, "a", "b") == 0
    assert capsys.readouterr().out.splitlines() == ["okE", "okE"]
    (job,) = stack.engine.generated
    sampling, stop = job.sampling, job.stop
    assert (job.prompt, job.n, job.priority, job.request_id) == ([BOS, *b"a b"], 2, -3, "mine")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    assert (sampling.seed, *penalties, sampling.logit_bias) == (9, 1.5, -0.5, 2, ((3, 8.0), (9, -4.5)))
    assert (stop.max_new_tokens, stop.min_new_tokens, stop.token_ids) == (20, 1, {MARK})


async def test_a_message_goes_through_the_template(stack: Stack):
    assert await run(stack, "generate", "--system", "be kind", "--max-new-tokens", "3", "hi") == 0
    assert await run(stack, "generate", "--chat", "--max-new-tokens", "3", "hi") == 0
    user = [BOS, *b"user: hi\nbot:"]
    assert [job.prompt for job in stack.engine.generated] == [[BOS, *b"system: be kind\n", *user], user]


@pytest.mark.parametrize(
    "given",
    [
        ["--json-schema", '{"type": "integer"}'],
        ["--regex", "@[a-z]+"],
        ["--grammar", 'start: "a"+'],
        ["--choice", "yes", "--choice", "no"],
    ],
)
async def test_constraints(stack: Stack, capsys, given, tmp_path):
    assert await run(stack, "generate", "--max-new-tokens", "3", *given, "hi") == 0
    assert stack.engine.generated[0].constraint is not None
    file = tmp_path / "given"
    file.write_text(given[1], encoding="utf-8")
    if given[0] in ("--json-schema", "--grammar"):
        assert await run(stack, "generate", "--max-new-tokens", "3", given[0], f"@{file}", "hi") == 0
        file.write_bytes(b"\xff")
        assert await run(stack, "generate", "--max-new-tokens", "3", given[0], f"@{file}", "hi") == 2
        assert "given is not UTF-8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["generate", *given, "--grammar" if given[0] != "--grammar" else "--regex", "x", "hi"])
    assert "not allowed with" in capsys.readouterr().err


async def test_log_probabilities_are_part_of_the_record(stack: Stack, capsys):
    stack.engine.next_stream = with_logprobs(play("ok!", n=2), PROMPT)
    asked = ["--logprobs", "1", "--prompt-logprobs", "--logprob-token-id", "7", "--logprob-token-id", "9"]
    assert (
        await run(stack, "generate", "--json", "--n", "2", "--max-new-tokens", "9", "--stop", "!", *asked, "hi!") == 0
    )
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["text"], first["finish_reason"], first["matched_stop"], first["tokens"]) == ("ok", "STOP", "!", 3)
    assert first["logprobs"][0] == {
        "token_id": ord("o"),
        "text": "o",
        "logprob": -0.25,
        "top": [{"token_id": 65, "text": "A", "logprob": -0.5}],
        "selected": [-0.125, -9.0],
    }
    assert [entry["token_id"] for entry in first["prompt_logprobs"]] == [104, 105, 33]
    assert "prompt_logprobs" not in second
    job = stack.engine.generated[0]
    assert (job.sampling.logprobs, job.prompt_logprobs, job.sampling.logprob_ids) == (1, 1, (7, 9))


async def test_bad_usage(stack: Stack, capsys):
    assert await run(stack, "generate", "--logprobs", "1", "hi") == 2
    assert "with --json alone" in capsys.readouterr().err
    assert await run(stack, "generate", "--grammar", "@/nowhere/at/all", "hi") == 2
    assert "/nowhere/at/all" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["generate", "--logit-bias", "7", "hi"])
    assert "is not ID=VALUE, as in 42=-5" in capsys.readouterr().err


def test_the_command_has_every_option_of_the_clients():
    """But those of whole conversations, which a line cannot hold."""
    given = vars(arguments.parser().parse_args(["generate", "hi"]))
    assert set(GenerateOptions.__annotations__) - set(given) == CHAT_OPTIONS
