"""What an EmbedRequest asks for, checked: everything but its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyruntime.errors import CapabilityMissing, InvalidField, NotFound
from pyruntime.registry import ServedModel
from pyruntime.service.convert import KIND_PB, POOLING_OF
from pyruntime.service.embed_vectors import vector_bytes
from pyruntime.service.inputs import Reading, TokenLimit
from pyruntime.service.room import ENVELOPE_BYTES, RequestSize, ServiceRoom, measure
from pyruntime.service.validate import check_count, check_enum, check_request_id, check_text, optional, text_bytes
from pyruntime.telemetry.call_record import current_id
from pyruntime.types import Capability, EmbeddingKind, EmbedRequest, ModelInfo, PoolingType
from pyruntime.v1 import common_pb2, embed_pb2

QUERY, DOCUMENT = "query", "document"
KIND_OF = {number: kind for kind, number in KIND_PB.items()} | {
    embed_pb2.EMBEDDING_KIND_UNSPECIFIED: EmbeddingKind.DENSE
}
# Fields that would be ignored, which is never what a client means by setting them.
_WITHOUT_MEANING = {
    EmbeddingKind.DENSE: (),
    EmbeddingKind.SPARSE: ("pooling", "normalize", "dimensions", "encoding"),
    EmbeddingKind.PER_TOKEN: ("pooling",),
}
# What a result holds beside its vectors: index, tokens, and the lengths of messages.
_RESULT_BYTES = 32


class EmbedInput(NamedTuple):
    """``skip``: how many of its first rows are not pooled; ``unseen``: how many last ones the others do not see."""

    ids: list[int]
    skip: int = 0
    unseen: int = 0


@dataclass(frozen=True)
class Prompt:
    """Text before each text input, its name and the request field that asked for it (empty: the model's default)."""

    text: str = ""
    field: str = ""
    name: str = ""


@dataclass(frozen=True)
class EmbedPlan:
    """How the inputs of a request are read, embedded and encoded."""

    model: ServedModel
    kind: EmbeddingKind
    pooling: PoolingType
    normalize: bool
    dimensions: int
    encoding: embed_pb2.Encoding
    prompt: Prompt
    token_limit: TokenLimit

    @property
    def are_queries(self) -> bool:
        """A late-interaction model's inputs under the prompt named query; any other is read as documents are."""
        return self.kind is EmbeddingKind.PER_TOKEN and self.model.info.late_interaction and self.prompt.name == QUERY

    @property
    def skips_prompt(self) -> bool:
        """Whether the prompt is read but left out of the pooling."""
        return self.kind is EmbeddingKind.DENSE and bool(self.prompt.text) and not self.model.info.prompt_is_pooled

    def reading(self, room: ServiceRoom) -> Reading:
        """Inputs whose prompt is not pooled are cut later, when it is known how much of the prompt stays."""
        limit = None if self.skips_prompt else self.token_limit
        limits, prompt = room.input_limits, self.prompt
        return Reading("inputs", limits, prompt=prompt.text, prompt_field=prompt.field, token_limit=limit)

    def job(self, request: embed_pb2.EmbedRequest, work: Sequence[EmbedInput]) -> EmbedRequest:
        """For the engine."""
        inputs, skips, unseen = map(list, zip(*work, strict=True))
        return EmbedRequest(
            inputs=inputs,
            pooling=self.pooling,
            normalize=self.normalize,
            dimensions=self.dimensions,
            priority=request.priority,
            request_id=current_id(),
            kind=self.kind,
            skip_rows=skips if any(skips) else None,
            as_query=self.are_queries,
            unattended=unseen if any(unseen) else None,
        )

    def measure(self, room: ServiceRoom, request: embed_pb2.EmbedRequest) -> RequestSize:
        """Before anything is tokenised: the size of all inputs, unless they or their answer are too large."""
        size = measure(request.inputs, text_bytes(self.prompt.text))
        room.check_request_text("inputs", size.num_bytes + size.num_ids)
        # A text has one token at least; how many ids of a list are kept is known.
        self.check_response_size(
            room, [max(1, min(len(each.token_ids.ids), self.token_limit.max_tokens)) for each in request.inputs]
        )
        return size

    def check_response_size(self, room: ServiceRoom, lengths: list[int]) -> None:
        """The answer to inputs of so many tokens. What a sparse embedding will hold cannot be told beforehand."""
        if self.kind is EmbeddingKind.SPARSE:
            return
        count = sum(lengths) if self.kind is EmbeddingKind.PER_TOKEN else len(lengths)
        total = count * vector_bytes(self.dimensions, self.encoding) + len(lengths) * _RESULT_BYTES + ENVELOPE_BYTES
        most = room.settings.max_message_bytes
        if total > most:
            problem = f"{count} vectors make a response of {total} bytes; allowed: at most {most} (max_message_bytes)"
            raise InvalidField("inputs", problem)


def make_plan(room: ServiceRoom, request: embed_pb2.EmbedRequest) -> EmbedPlan:
    """Raises what is wrong with the request as a whole: bad options, no such model, a model that cannot."""
    _check(room, request)
    kind = KIND_OF[request.kind]
    capability = Capability.SPARSE_EMBED if kind is EmbeddingKind.SPARSE else Capability.EMBED
    model = room.registry.resolve(request.model, capability)
    info = model.info
    if kind not in info.embedding_kinds:
        has = ", ".join(sorted(each.name for each in info.embedding_kinds))
        raise CapabilityMissing(f"model {info.name!r} has no {kind.name} embeddings; it has: {has}")
    plan = EmbedPlan(
        model=model,
        kind=kind,
        pooling=POOLING_OF.get(request.pooling, info.default_pooling),
        normalize=optional(request, "normalize", info.normalize_default),
        dimensions=_dimensions(request, info, kind),
        encoding=request.encoding,
        prompt=choose_prompt(request, info),
        token_limit=_token_limit(request, model),
    )
    _check_expansion(plan)
    return plan


def choose_prompt(request: embed_pb2.EmbedRequest, info: ModelInfo) -> Prompt:
    """The request's prompt, else the named one, else the model's default. ``NotFound`` for an unknown name."""
    if request.HasField("prompt"):
        return Prompt(request.prompt, "prompt" if request.prompt else "")
    asked = request.HasField("prompt_name")
    name = request.prompt_name if asked else info.default_prompt_name
    if not name:
        return Prompt()
    # The names that late-interaction models tell queries and documents apart by; not each has a text for them.
    prompts = ({QUERY: "", DOCUMENT: ""} if info.late_interaction else {}) | info.prompts
    if name not in prompts:
        raise NotFound("prompt_name", name, list(prompts))
    return Prompt(prompts[name], "prompt_name" if asked else "", name)


def _check(room: ServiceRoom, request: embed_pb2.EmbedRequest) -> None:
    """The checks that need no model."""
    check_request_id(request.request_id)
    room.check_inputs("inputs", len(request.inputs))
    check_enum("kind", request.kind, embed_pb2.EmbeddingKind)
    check_enum("pooling", request.pooling, embed_pb2.Pooling)
    check_enum("encoding", request.encoding, embed_pb2.Encoding)
    check_enum("truncation", request.truncation, common_pb2.Truncation)
    if request.HasField("prompt") and request.HasField("prompt_name"):
        raise InvalidField("prompt", "is set together with prompt_name; allowed: one of them")
    check_text("prompt", request.prompt, room.input_limits.max_text_bytes, may_be_blank=True)
    given = {field.name for field, _ in request.ListFields()}
    for name in _WITHOUT_MEANING[KIND_OF[request.kind]]:
        if name in given and not (name == "encoding" and request.encoding == embed_pb2.ENCODING_FLOAT):
            kind = embed_pb2.EmbeddingKind.Name(request.kind)
            raise InvalidField(name, f"has no meaning for {kind}; allowed: unset")


def _check_expansion(plan: EmbedPlan) -> None:
    info = plan.model.info
    expansion = info.query_expansion
    if plan.are_queries and expansion is not None and expansion.length > info.context_length:
        problem = f"queries have {expansion.length} tokens; allowed: at most {info.context_length}"
        raise CapabilityMissing(f"model {info.name!r}: {problem}")


def _dimensions(request: embed_pb2.EmbedRequest, info: ModelInfo, kind: EmbeddingKind) -> int:
    widest = info.token_embedding_dimensions if kind is EmbeddingKind.PER_TOKEN else info.embedding_dimensions
    dimensions = optional(request, "dimensions", widest)
    if request.HasField("dimensions"):
        check_count("dimensions", dimensions, 1, widest)
    return dimensions


def _token_limit(request: embed_pb2.EmbedRequest, model: ServedModel) -> TokenLimit:
    longest = model.info.context_length
    max_tokens = optional(request, "max_tokens", longest)
    # Truncation keeps the special tokens, so there must be room for them and for one token of text.
    check_count("max_tokens", max_tokens, 1 + model.tokenizer.num_special, longest)
    return TokenLimit(max_tokens, request.truncation)
