"""The ``pyruntime`` command: the services from a shell. One result a line; with ``--json``, one JSON object a line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from grpc_health.v1 import health_pb2

from pyruntime.client import arguments, console, generate_command, messages, ranking
from pyruntime.client.calls import api_errors
from pyruntime.client.errors import ApiError
from pyruntime.client.messages import DEFAULT_TIMEOUT_S
from pyruntime.client.retry import Retry
from pyruntime.client.sync import Client
from pyruntime.v1 import model_pb2

# Returns how many of the inputs the server refused; those have been shown.
Run: TypeAlias = Callable[[Client, argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when the server refuses or cannot be reached, 2 for bad usage, 130 when interrupted."""
    options = arguments.parser().parse_args(argv)
    try:
        with open_client(options) as client:
            return 1 if RUNS[options.command](client, options) else 0
    except ApiError as error:
        console.print_error(error, options.target)
        return 1
    except UnicodeEncodeError:
        # Bytes of the command line that are no UTF-8 reach Python as lone surrogates, which cannot be sent.
        print("pyruntime: an argument is not UTF-8", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough. Nothing must be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TypeError, ValueError, OSError) as error:
        # A number that its field cannot hold, which protobuf refuses; an address that is none; a missing file.
        print(f"pyruntime: {error}", file=sys.stderr)
        return 2
    return 0


def open_client(options: argparse.Namespace) -> Client:
    token = console.token_of(options.token_file)
    return Client(
        options.target,
        timeout_s=DEFAULT_TIMEOUT_S if options.timeout is None else options.timeout,
        model=getattr(options, "model", ""),
        retry=Retry(on_wait=console.print_wait),
        tls=options.tls,
        root_certificates=options.ca,
        certificate=options.certificate,
        key=options.key,
        token=token,
    )


def run_embed(client: Client, options: argparse.Namespace) -> int:
    texts = console.texts(options.text, "text")
    names = "kind pooling normalize dimensions truncation prompt_name".split()
    given = {name: getattr(options, name) for name in names}
    results: Any = client.embed_stream(
        texts, batch_size=options.batch_size or console.CHUNK, timeout_s=options.timeout, return_errors=True, **given
    )
    failed = 0
    for index, result in enumerate(console.progress(results, texts.count, "texts")):
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
        response = client.calls.answer(client.score_stub.Score, request, options.timeout, patient=True)
        if not labels:  # those of a model that has its own
            labels.extend(next(each.labels for each in client.models() if each.name == response.model))
        return list(messages.each_score(response))

    labels: list[str] = list(options.label or ())
    failed = 0
    for start, chunk in console.chunks(console.texts(options.item, "item"), "items", options.batch_size):
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
        response = client.calls.answer(client.score_stub.Rerank, request, options.timeout, patient=True)
        found: dict[int, Any] = {each.index: each.score for each in response.results}
        found |= {each.index: ApiError.from_status(each.error) for each in response.errors}
        return [found[index] for index in range(len(part))]

    documents: list[str] = []
    answers: list[Any] = []
    for _, chunk in console.chunks(console.texts(options.document, "document"), "documents", options.batch_size):
        documents += chunk
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
        response = client.calls.answer(client.score_stub.Classify, request, options.timeout, patient=True)
        return list(ranking.each_classes(response))

    failed = 0
    for start, chunk in console.chunks(console.texts(options.text, "text"), "texts", options.batch_size):
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
            "quantization": model.quantization,
            "device": model.device,
            "capabilities": capabilities,
            "context_length": model.context_length,
            "embedding_dimensions": model.embedding_dimensions,
        }
        kept = model.dtype if model.quantization in ("", "none") else f"{model.quantization} and {model.dtype}"
        facts = f"{kept} on {model.device}, {model.context_length} tokens"
        console.emit(options, record, f"{model.name}: {model.architecture}, {facts}: {', '.join(capabilities)}")
    return 0


def run_health(client: Client, options: argparse.Namespace) -> int:
    """One attempt: a probe is to tell what is, and soon."""
    request = health_pb2.HealthCheckRequest(service=options.service)
    try:
        with api_errors():
            answer = client.health_stub.Check(request, timeout=options.timeout)
    except ApiError as error:
        if error.code == "NOT_FOUND":  # the protocol's answer, which has no words
            raise ApiError("NOT_FOUND", f"the server has no service {options.service!r}") from None
        raise
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    console.emit(options, {"service": options.service, "status": status}, status)
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


def run_tokenize(client: Client, options: argparse.Namespace) -> int:
    for text in console.texts(options.text, "text"):
        response = client.tokenize(text, special_tokens=False if options.no_special_tokens else None)
        pairs = list(zip(response.token_ids, response.pieces, strict=True))
        record = {"token_ids": list(response.token_ids), "pieces": list(response.pieces)}
        console.emit(options, record, " ".join(f"{token_id}:{piece}" for token_id, piece in pairs))
    return 0


RUNS: dict[str, Run] = {
    "generate": generate_command.run,
    "embed": run_embed,
    "score": run_score,
    "rerank": run_rerank,
    "classify": run_classify,
    "models": run_models,
    "health": run_health,
    "tokenize": run_tokenize,
}


if __name__ == "__main__":
    sys.exit(main())
