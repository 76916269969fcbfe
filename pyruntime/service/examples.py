"""Ready-to-paste grpcurl calls for the models that are served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from pyruntime.registry import ServedModel
from pyruntime.service.score_heads import has_classifier
from pyruntime.types import Capability


def example_requests(models: Iterable[ServedModel]) -> list[tuple[str, dict[str, Any]]]:
    """(full method name, request as JSON) of a first call to each kind of service that a model can answer."""
    served = list(models)
    calls: list[tuple[str, dict[str, Any]]] = [("pyruntime.v1.ModelService/ListModels", {})]
    if name := _first(served, Capability.GENERATE):
        request: dict[str, Any] = {
            "model": name,
            "text": "The three primary colours are",
            "sampling": {"temperature": 0},
            "stop": {"max_new_tokens": 24},
        }
        calls.append(("pyruntime.v1.GenerateService/GenerateStream", request))
    if name := _first(served, Capability.EMBED):
        inputs = [{"text": "A cat sits on the mat."}, {"text": "Ein Hund schläft."}]
        calls.append(("pyruntime.v1.EmbedService/Embed", {"model": name, "inputs": inputs, "dimensions": 8}))
    if name := _first(served, Capability.SCORE):
        request = {
            "model": name,
            "query": {"text": "Red or blue? "},
            "items": [{"text": "A tomato is"}, {"text": "The sky is"}],
            "apply_softmax": True,
        }
        if not has_classifier(next(model for model in served if model.info.name == name)):
            request["labels"] = [" red", " blue"]
        calls.append(("pyruntime.v1.ScoreService/Score", request))
    return calls


def grpcurl_calls(models: Iterable[ServedModel], address: str, flags: str = "-plaintext") -> list[str]:
    """The same as command lines for a POSIX shell."""
    where = address.removeprefix("unix:")
    return [
        f"grpcurl {flags} -d {shlex.quote(json.dumps(request, ensure_ascii=False))} {where} {method}"
        for method, request in example_requests(models)
    ]


def _first(models: list[ServedModel], capability: Capability) -> str | None:
    """Of several, the one that does the least else: an encoder for embeddings, rather than a decoder that can too."""
    able = [model.info for model in models if capability in model.info.capabilities]
    return min(able, key=lambda info: len(info.capabilities)).name if able else None
