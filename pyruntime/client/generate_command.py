"""``pyruntime generate``: its options, and what it prints."""

from __future__ import annotations

import argparse
from typing import Any

from pyruntime.client import console
from pyruntime.client.messages import finish_name
from pyruntime.client.options import GenerateOptions
from pyruntime.client.sync import Client
from pyruntime.v1 import generate_pb2

_LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")
_FROM_FILES = ("json_schema", "grammar")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that the request has are named as in ``GenerateOptions``."""
    parser.add_argument("prompt", nargs="*", help="the prompt; none or - reads standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message in the model's template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; means --chat; @FILE reads a file")
    parser.add_argument("--n", type=int, metavar="N", help="continuations; more than one are not streamed")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="print N tokens at a time at least; default 1")
    parser.add_argument("--priority", type=int, metavar="N", help="higher ones enter the batch first; default 0")
    parser.add_argument("--request-id", metavar="NAME", help="your name for the request in the server's log")
    _sampling(parser.add_argument_group("how a token is drawn"))
    _stops(parser.add_argument_group("when the text ends"))
    _constraints(parser.add_argument_group("what the text must conform to"))
    _logprobs(parser.add_argument_group("log-probabilities, with --json"))


def _sampling(group: Any) -> None:
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: the model's own")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="1 is off; default: the model's own")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--logit-bias", type=_bias, action="append", metavar="ID=VALUE", help="repeat it for more")
    group.add_argument("--seed", type=int, metavar="N", help="makes the draw repeatable")


def _stops(group: Any) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", default=256, help="default 256")
    group.add_argument("--min-new-tokens", type=int, metavar="N")
    group.add_argument("--stop", action="append", metavar="TEXT", help="a string that ends it; repeat it for more")
    group.add_argument("--stop-token-id", dest="stop_token_ids", type=int, action="append", metavar="ID")
    group.add_argument("--include-stop-in-text", action="store_true", default=None)
    group.add_argument("--ignore-eos", action="store_true", default=None, help="the model's own end does not end it")


def _constraints(group: Any) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="SCHEMA", help="a JSON schema; @FILE reads a file")
    one.add_argument("--regex", metavar="PATTERN", help="a regular expression of the whole text")
    one.add_argument("--grammar", metavar="RULES", help="a grammar in the notation of Lark; @FILE reads a file")
    one.add_argument("--choice", action="append", metavar="TEXT", help="one of several texts; repeat it")


def _logprobs(group: Any) -> None:
    group.add_argument("--logprobs", type=int, metavar="N", help="of each token, and the N likeliest in its place")
    group.add_argument("--prompt-logprobs", action="store_true", default=None, help="of the prompt's tokens too")
    group.add_argument("--logprob-token-id", dest="logprob_token_ids", type=int, action="append", metavar="ID")


def run(client: Client, options: argparse.Namespace) -> int:
    """Streamed as it grows; with ``--json``, or several continuations, when all of it is there."""
    if not options.json and any(getattr(options, name) is not None for name in _LOGPROBS):
        raise ValueError("log-probabilities are shown with --json alone")
    given = _given(options)
    prompt: Any = console.whole_text(options.prompt, "prompt")
    if options.chat or options.system is not None:
        system = [] if options.system is None else [{"role": "system", "content": _text(options.system)}]
        prompt = [*system, {"role": "user", "content": prompt}]
    if options.json or (options.n or 1) > 1:
        response = client.complete(prompt, **given)
        for completion in response.completions:
            console.emit(options, _record(completion, response, options), completion.text)
        return 0
    for text in client.stream(prompt, **given):
        print(text, end="", flush=True)
    print()
    return 0


def _given(options: argparse.Namespace) -> Any:
    """The request's options."""
    given = {name: value for name, value in vars(options).items() if name in GenerateOptions.__annotations__}
    given |= {name: _text(given[name]) for name in _FROM_FILES if given.get(name) is not None}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def _text(value: str) -> str:
    """The value itself, or with ``@`` what the file behind it holds."""
    if not value.startswith("@"):
        return value
    with open(value[1:], encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{value[1:]} is not UTF-8: {error.reason} at byte {error.start}") from None


def _record(
    completion: generate_pb2.Completion, response: generate_pb2.GenerateResponse, options: argparse.Namespace
) -> dict[str, Any]:
    """Log-probabilities where they were asked for; the prompt's with the first continuation."""
    finish = finish_name(completion.finish_reason)
    record: dict[str, Any] = {"index": completion.index, "text": completion.text, "finish_reason": finish}
    record["tokens"] = len(completion.token_ids)
    if completion.matched_stop:
        record["matched_stop"] = completion.matched_stop
    if completion.logprobs:
        record["logprobs"] = [_entry(each) for each in completion.logprobs]
    if options.prompt_logprobs and completion.index == 0:
        record["prompt_logprobs"] = [_entry(each) for each in response.prompt_logprobs]
    return record


def _entry(token: generate_pb2.TokenLogprob) -> dict[str, Any]:
    entry: dict[str, Any] = {"token_id": token.token_id, "text": token.text, "logprob": token.logprob}
    if token.top:
        entry["top"] = [{"token_id": e.token_id, "text": e.text, "logprob": e.logprob} for e in token.top]
    if token.selected:
        entry["selected"] = list(token.selected)
    return entry


def _bias(value: str) -> tuple[int, float]:
    token_id, _, bias = value.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not ID=VALUE, as in 42=-5") from None
