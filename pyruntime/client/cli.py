"""The ``pyruntime`` command: the services from a shell. One result a line; with ``--json``, one JSON object a line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from pyruntime.client import console, messages, ranking
from pyruntime.client.errors import ApiError
from pyruntime.client.messages import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, finish_name
from pyruntime.client.sync import Client, api_errors
from pyruntime.v1 import model_pb2

# Returns how many of the inputs the server refused; those have been shown.
Run: TypeAlias = Callable[[Client, argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when the server refuses or cannot be reached, 2 for bad usage, 130 when interrupted."""
    options = _parser().parse_args(argv)
    try:
        timeout_s = DEFAULT_TIMEOUT_S if options.timeout is None else options.timeout
        with Client(options.target, timeout_s=timeout_s, model=getattr(options, "model", "")) as client:
            return 1 if options.run(client, options) else 0
    except ApiError as error:
        console.print_error(error)
        return 1
    except UnicodeEncodeError:
        # Bytes of the command line that are no UTF-8 reach Python as lone surrogates, which cannot be sent.
        print("pyruntime: an argument is not UTF-8", file=sys.stderr)
        return 2
    except (TypeError, ValueError) as error:
        # A number that its field cannot hold, a negative count for example: protobuf refuses it before it is sent.
        print(f"pyruntime: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough. Nothing must be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run_generate(client: Client, options: argparse.Namespace) -> int:
    names = "temperature top_p top_k min_p seed max_new_tokens min_new_tokens stop ignore_eos n".split()
    given = {name: getattr(options, name) for name in names}
    prompt = console.texts(options.prompt, "prompt", whole=True)[0]
    if options.json or (options.n or 1) > 1:
        response = client.complete(prompt, **given)
        for completion in response.completions:
            finish = finish_name(completion.finish_reason)
            record = {"index": completion.index, "text": completion.text, "finish_reason": finish}
            console.emit(options, record | {"tokens": len(completion.token_ids)}, completion.text)
        return 0
    for text in client.stream(prompt, **given):
        print(text, end="", flush=True)
    print()
    return 0


def run_embed(client: Client, options: argparse.Namespace) -> int:
    texts = console.texts(options.text, "text")
    names = "kind pooling normalize dimensions truncation prompt_name".split()
    given = {name: getattr(options, name) for name in names}
    results = client.embed_stream(
        texts, batch_size=console.CHUNK, timeout_s=options.timeout, return_errors=True, **given
    )
    failed = 0
    for index, result in enumerate(console.progress(results, len(texts), "texts")):
        if isinstance(result, ApiError):
            failed += console.emit_error(options, index, "text", result)
        else:
            record, line = console.shown_embedding(result)
            console.emit(options, {"index": index} | record, line)
    return failed


def run_score(client: Client, options: argparse.Namespace) -> int:
    def ask(items: list[str]) -> list[Any]:
        given = {"apply_softmax": options.apply_softmax, "item_first": options.item_first}
        request = messages.score_request(options.query, items, options.label or (), options.model, given)
        with api_errors():
            response = client.score_stub.Score(request, timeout=options.timeout)
        if not labels:  # those of a model that has its own
            labels.extend(next(each.labels for each in client.models() if each.name == response.model))
        return list(messages.each_score(response))

    labels: list[str] = list(options.label or ())
    failed = 0
    for start, chunk in console.chunks(console.texts(options.item, "item"), "items"):
        for index, result in enumerate(each_answer(chunk, "items", ask), start):
            if isinstance(result, ApiError):
                failed += console.emit_error(options, index, "item", result)
                continue
            item = chunk[index - start]
            by_label = dict(zip(labels, result.tolist(), strict=True))
            shown = "  ".join(f"{label!r} {score:.6f}" for label, score in by_label.items())
            console.emit(options, {"index": index, "item": item, "scores": by_label}, f"{shown}  {item}")
    return failed


def each_answer(chunk: list[str], field: str, ask: Callable[[list[str]], list[Any]]) -> list[Any]:
    """What ``ask`` says of each. A chunk without one good entry is refused whole: then each is asked about alone."""
    try:
        return ask(chunk)
    except ApiError as error:
        if not error.violations or any(not each.field.startswith(f"{field}[") for each in error.violations):
            raise
        return [error] if len(chunk) == 1 else [each_answer([entry], field, ask)[0] for entry in chunk]


def run_rerank(client: Client, options: argparse.Namespace) -> int:
    """In parts, since a document's score does not depend on the others."""
    names = "instruction raw_scores truncation".split()
    given = {name: getattr(options, name) for name in names}

    def ask(part: list[str]) -> list[Any]:
        request = ranking.rerank_request(options.query, part, options.model, given)
        with api_errors():
            response = client.score_stub.Rerank(request, timeout=options.timeout)
        found: dict[int, Any] = {each.index: each.score for each in response.results}
        found |= {each.index: ApiError.from_status(each.error) for each in response.errors}
        return [found[index] for index in range(len(part))]

    documents = console.texts(options.document, "document")
    answers: list[Any] = []
    for _, chunk in console.chunks(documents, "documents"):
        answers += each_answer(chunk, "documents", ask)
    good = [index for index, answer in enumerate(answers) if not isinstance(answer, ApiError)]
    for index in sorted(good, key=lambda index: -answers[index])[: options.top_n]:
        record = {"index": index, "score": answers[index], "document": documents[index]}
        console.emit(options, record, f"{answers[index]:.6f}  {documents[index]}")
    bad = [(index, answer) for index, answer in enumerate(answers) if isinstance(answer, ApiError)]
    return sum(console.emit_error(options, index, "document", error) for index, error in bad)


def run_classify(client: Client, options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in "raw_scores top_k truncation".split()}
    is_pair = options.first is not None

    def ask(part: list[str]) -> list[Any]:
        inputs = [(options.first, text) for text in part] if is_pair else part
        request = ranking.classify_request(inputs, options.model, given)
        with api_errors():
            return list(ranking.each_classes(client.score_stub.Classify(request, timeout=options.timeout)))

    failed = 0
    for start, chunk in console.chunks(console.texts(options.text, "text"), "texts"):
        for index, result in enumerate(each_answer(chunk, "pairs" if is_pair else "inputs", ask), start):
            if isinstance(result, ApiError):
                failed += console.emit_error(options, index, "text", result)
            else:
                record, line = console.shown_classes(result)
                console.emit(options, {"index": index, "text": chunk[index - start]} | record, line)
    return failed


def run_models(client: Client, options: argparse.Namespace) -> int:
    for model in client.models():
        capabilities = [model_pb2.Capability.Name(each).removeprefix("CAPABILITY_") for each in model.capabilities]
        record = {
            "name": model.name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "device": model.device,
            "capabilities": capabilities,
            "context_length": model.context_length,
            "embedding_dimensions": model.embedding_dimensions,
        }
        facts = f"{model.dtype} on {model.device}, {model.context_length} tokens"
        console.emit(options, record, f"{model.name}: {model.architecture}, {facts}: {', '.join(capabilities)}")
    return 0


def run_tokenize(client: Client, options: argparse.Namespace) -> int:
    for text in console.texts(options.text, "text"):
        response = client.tokenize(text, special_tokens=False if options.no_special_tokens else None)
        pairs = list(zip(response.token_ids, response.pieces, strict=True))
        record = {"token_ids": list(response.token_ids), "pieces": list(response.pieces)}
        console.emit(options, record, " ".join(f"{token_id}:{piece}" for token_id, piece in pairs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pyruntime", description=(__doc__ or "").replace("``", ""))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _generate_options(_command(commands, "generate", "continue a prompt, streamed as it grows", run_generate))
    embed = _command(commands, "embed", "turn texts into vectors", run_embed)
    embed.add_argument("text", nargs="*", help="texts; none or - reads lines from standard input")
    embed.set_defaults(timeout=None)  # many texts take as long as they take
    embed.add_argument("--kind", choices=["dense", "sparse", "per_token"], help="default: dense, one vector a text")
    embed.add_argument("--pooling", choices=["last", "cls", "mean"], help="default: the model's own")
    embed.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="default: the model's own")
    embed.add_argument("--dimensions", type=int, help="keep the first numbers only")
    embed.add_argument("--truncation", choices=["none", "right", "left"], help="default: none, too long is an error")
    embed.add_argument("--prompt-name", help="one of the model's prompts")
    score = _command(commands, "score", "how likely labels are after a query and each item", run_score)
    score.add_argument("query", help="what every item is read behind")
    score.add_argument("item", nargs="*", help="items; none or - reads lines from standard input")
    score.add_argument("--label", action="append", help="one token; repeat it; none: the model's own")
    score.add_argument("--apply-softmax", action="store_true", help="normalise over the labels alone")
    score.add_argument("--item-first", action="store_true", help="put each item before the query")
    rerank = _command(commands, "rerank", "order documents by how well they answer a query", run_rerank)
    rerank.add_argument("query", help="the query")
    rerank.add_argument("document", nargs="*", help="documents; none or - reads lines from standard input")
    rerank.add_argument("--top-n", type=_count, help="how many come back; default all")
    rerank.add_argument("--instruction", help="what the query looks for; default: the model's own")
    _reading_options(rerank)
    classify = _command(commands, "classify", "which class each text has", run_classify)
    classify.add_argument("text", nargs="*", help="texts; none or - reads lines from standard input")
    classify.add_argument("--first", help="each text is read as the second of a pair behind this one")
    classify.add_argument("--top-k", type=_count, help="how many labels come back; default all")
    _reading_options(classify)
    _command(commands, "models", "what the server serves", run_models, takes_model=False)
    tokenize = _command(commands, "tokenize", "the token ids of texts", run_tokenize)
    tokenize.add_argument("text", nargs="*", help="texts; none or - reads lines from standard input")
    tokenize.add_argument("--no-special-tokens", action="store_true", help="leave the model's special tokens out")
    return parser


def _command(
    commands: Any,
    name: str,
    help_text: str,
    run: Run,
    takes_model: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(run=run)
    parser.add_argument("--target", default=os.environ.get("PYRUNTIME_TARGET", DEFAULT_TARGET), help="host:port")
    parser.add_argument("--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, help="seconds for a call")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    if takes_model:
        parser.add_argument("--model", default="", help="may be left out when one served model fits")
    return parser


def _reading_options(parser: argparse.ArgumentParser) -> None:
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


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="the prompt; none or - reads standard input")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--min-new-tokens", type=int)
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's own")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int, help="makes the draw repeatable")
    parser.add_argument("--stop", action="append", help="a string that ends the text; repeat it for more")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    parser.add_argument("--n", type=int, help="continuations; more than one are not streamed")


if __name__ == "__main__":
    sys.exit(main())
