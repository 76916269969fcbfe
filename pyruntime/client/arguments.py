"""What the commands take: the parser of the ``pyruntime`` command line."""

from __future__ import annotations

import argparse
import os
from typing import Any

from pyruntime.client import generate_command
from pyruntime.client.messages import DEFAULT_TARGET, DEFAULT_TIMEOUT_S

_DESCRIPTION = """\
Ask a pyruntime server from a shell. One result a line; with --json, one JSON object a line.
Results go to standard output; progress, and what is wrong with single inputs, to standard error."""
_EPILOG = """\
examples:
  pyruntime models
  pyruntime generate --model gemma-3-270m --temperature 0 "The three primary colours are"
  pyruntime embed --model all-minilm-l6-v2 --json < texts.txt > vectors.jsonl
  pyruntime score --label " red" --label " blue" --apply-softmax "Red or blue? " "The sky is"

PYRUNTIME_TARGET stands in for --target, PYRUNTIME_TOKEN for --token-file.
exit status: 0 all went well, 1 the server refused something or could not be reached, 2 bad usage, 130 interrupted"""


def parser() -> argparse.ArgumentParser:
    """Its ``command`` names the subcommand."""
    parser = argparse.ArgumentParser(
        prog="pyruntime",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    generate_command.add_options(_command(commands, "generate", "continue a prompt, streamed as it grows"))
    # Many texts take as long as they take.
    _embed_options(_command(commands, "embed", "turn texts into vectors", timeout_s=None))
    score = _command(commands, "score", "how likely labels are after a query and each item")
    score.add_argument("query", help="what every item is read behind")
    score.add_argument("item", nargs="*", help="items; none or - reads lines from standard input")
    score.add_argument("--label", action="append", help="one token; repeat it; none: the model's own")
    score.add_argument("--apply-softmax", action="store_true", help="normalise over the labels alone")
    score.add_argument("--item-first", action="store_true", help="put each item before the query")
    _batch_option(score)
    rerank = _command(commands, "rerank", "order documents by how well they answer a query")
    rerank.add_argument("query", help="the query")
    rerank.add_argument("document", nargs="*", help="documents; none or - reads lines from standard input")
    rerank.add_argument("--top-n", type=_count, help="how many come back; default all")
    rerank.add_argument("--instruction", help="what the query looks for; default: the model's own")
    _reading_options(rerank)
    classify = _command(commands, "classify", "which class each text has")
    classify.add_argument("text", nargs="*", help="texts; none or - reads lines from standard input")
    classify.add_argument("--first", help="each text is read as the second of a pair behind this one")
    classify.add_argument("--top-k", type=_count, help="how many labels come back; default all")
    _reading_options(classify)
    _command(commands, "models", "what the server serves", takes_model=False)
    health = _command(commands, "health", "whether the server is ready, as exit status", takes_model=False, timeout_s=3)
    health.add_argument("service", nargs="?", default="", help="liveness, model/NAME or a gRPC service; default: all")
    tokenize = _command(commands, "tokenize", "the token ids of texts")
    tokenize.add_argument("text", nargs="*", help="texts; none or - reads lines from standard input")
    tokenize.add_argument("--no-special-tokens", action="store_true", help="leave the model's special tokens out")
    return parser


def _command(
    commands: Any,
    name: str,
    help_text: str,
    takes_model: bool = True,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text)
    if takes_model:
        parser.add_argument("--model", default="", help="may be left out when one served model fits")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    timeout_help = "seconds for all of it; default: none" if timeout_s is None else f"seconds; default {timeout_s:g}"
    parser.add_argument("--timeout", type=_seconds, default=timeout_s, help=timeout_help)
    _connection_options(parser.add_argument_group("the server"))
    return parser


def _connection_options(group: Any) -> None:
    target = os.environ.get("PYRUNTIME_TARGET", DEFAULT_TARGET)
    group.add_argument("--target", default=target, help="HOST:PORT or unix:PATH; default %(default)s")
    group.add_argument("--tls", action="store_true", default=None, help="encrypt; also meant by --ca and --certificate")
    group.add_argument("--ca", metavar="FILE", help="PEM certificates to trust; default: the public ones")
    group.add_argument("--certificate", metavar="FILE", help="PEM certificate of this client, for mutual TLS")
    group.add_argument("--key", metavar="FILE", help="PEM key of --certificate")
    group.add_argument("--token-file", metavar="FILE", help="holds the bearer token; default: PYRUNTIME_TOKEN, if set")


def _embed_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", help="texts; none or - reads lines from standard input")
    parser.add_argument("--kind", choices=["dense", "sparse", "per_token"], help="default: dense, one vector a text")
    parser.add_argument("--pooling", choices=["last", "cls", "mean"], help="default: the model's own")
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="default: the model's own")
    parser.add_argument("--dimensions", type=int, help="keep the first numbers only")
    parser.add_argument("--truncation", choices=["none", "right", "left"], help="default: none, too long is an error")
    parser.add_argument("--prompt-name", help="one of the model's prompts")
    _batch_option(parser)


def _batch_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=_count, help="inputs in a request; default 64")


def _reading_options(parser: argparse.ArgumentParser) -> None:
    _batch_option(parser)
    parser.add_argument("--raw-scores", action="store_true", help="logits instead of the model's activation")
    parser.add_argument("--truncation", choices=["none", "right", "left"], help="default: none, too long is an error")


def _seconds(value: str) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is out of range; allowed: above 0")
    return number


def _count(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is out of range; allowed: 1 or more")
    return number
