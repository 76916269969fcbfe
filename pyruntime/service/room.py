"""What the servicers share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from pyruntime.config import Settings
from pyruntime.constraints.compiler import ConstraintCompiler
from pyruntime.errors import InvalidField, InvalidFields, PyruntimeError
from pyruntime.registry import ModelRegistry, ServedModel
from pyruntime.service.inputs import InputLimits
from pyruntime.service.validate import check_length, text_bytes
from pyruntime.service.workers import TextWorkers
from pyruntime.telemetry.call_record import current_call
from pyruntime.types import Task
from pyruntime.v1 import common_pb2

if TYPE_CHECKING:
    from pyruntime.admission import Ticket

T = TypeVar("T")

# What a response holds beside its results: the model's name, usage and timing.
ENVELOPE_BYTES = 512


class RequestSize(NamedTuple):
    """What is known of a request's tokens before its texts are tokenised."""

    num_bytes: int = 0
    num_ids: int = 0


def measure(inputs: Iterable[common_pb2.Input], prompt_bytes: int = 0) -> RequestSize:
    """Bytes of the texts, each with a prompt of ``prompt_bytes`` bytes before it, and token ids given as such."""
    num_bytes = num_ids = 0
    for each in inputs:
        if each.WhichOneof("value") == "text":
            num_bytes += prompt_bytes + text_bytes(each.text)
        else:
            num_ids += len(each.token_ids.ids)
    return RequestSize(num_bytes, num_ids)


@dataclass
class ServiceRoom:
    """The collaborators of every servicer, and the checks against the server's own limits.

    ``is_alone``: no other call of the models' services is open.
    """

    registry: ModelRegistry
    settings: Settings
    workers: TextWorkers = field(default_factory=TextWorkers)
    constraints: ConstraintCompiler = field(default_factory=ConstraintCompiler)
    is_alone: Callable[[], bool] = bool

    @property
    def input_limits(self) -> InputLimits:
        """Of one text or chat, which is never allowed more than a whole request is."""
        longest = min(self.settings.max_text_bytes, self.settings.max_request_text_bytes)
        return InputLimits(longest, self.settings.max_inputs_per_request)

    @contextlib.contextmanager
    def admitted(
        self,
        context: grpc.aio.ServicerContext,
        model: ServedModel,
        task: Task,
        priority: int,
        size: RequestSize,
    ) -> Iterator[Ticket]:
        """A place in the model's queue, taken before tokenising and held to the end of the call::

            with room.admitted(context, model, Task.EMBED, request.priority, measure(request.inputs)) as ticket:
                ...tokenise...
                answers, step = await model.engine.embed(job, ticket=ticket)

        The ticket carries the call's deadline, so that the engine stops at it; one ticket may go with several engine
        calls of the same gRPC call. Raises ``Overloaded`` or ``DeadlinePassed``.
        """
        if (call := current_call()) is not None:
            call.model = model.info.name
        remaining_s = context.time_remaining()
        deadline = None if remaining_s is None else time.monotonic() + remaining_s
        sizes = {"num_bytes": size.num_bytes, "num_ids": size.num_ids}
        with model.engine.admit(task, priority, deadline=deadline, **sizes) as ticket:
            yield ticket

    def check_inputs(self, field_name: str, count: int) -> None:
        """A list that one request may carry: neither empty nor too long."""
        most = self.settings.max_inputs_per_request
        if not 1 <= count <= most:
            raise InvalidField(field_name, f"has {count} entries; allowed: 1 to {most}")

    def check_request_text(self, field_name: str, num_bytes: int) -> None:
        """All texts of a request, each with its prompt."""
        check_length(field_name, num_bytes, self.settings.max_request_text_bytes, "bytes of text in all")

    def check_scores(self, field_name: str, num_items: int, num_labels: int) -> None:
        """The work and the answer of a Score."""
        most, total = self.settings.max_scores_per_request, num_items * num_labels
        if total > most:
            problem = f"{num_items} items x {num_labels} labels are {total} scores; allowed: at most {most}"
            raise InvalidField(field_name, problem)

    def check_response_size(self, field_name: str, largest: Message, count: int) -> None:
        """A response of ``count`` results, of which ``largest`` is the largest and travels as a message of its own."""
        one = largest.ByteSize()
        tag_and_length = 1 + max(1, (one.bit_length() + 6) // 7)
        total = count * (tag_and_length + one) + ENVELOPE_BYTES
        most = self.settings.max_message_bytes
        if total > most:
            problem = f"{count} results make a response of {total} bytes; allowed: at most {most} (max_message_bytes)"
            raise InvalidField(field_name, problem)


def good_ones(items: list[T | InvalidField]) -> list[T]:
    """The items without an error, in order. When there are none the request is refused whole: ``InvalidFields``."""
    good = [item for item in items if not isinstance(item, InvalidField)]
    if not good:
        raise InvalidFields([item for item in items if isinstance(item, InvalidField)])
    return good


def refuse_if_all_failed(outcomes: Sequence[Any]) -> None:
    """Raises when every outcome is an error: all of them if all are about fields, else the first that is not."""
    errors = [each for each in outcomes if isinstance(each, PyruntimeError)]
    if not errors or len(errors) < len(outcomes):
        return
    fields = [each for each in errors if isinstance(each, InvalidField)]
    if len(fields) == len(errors):
        raise InvalidFields(fields)
    raise next(each for each in errors if not isinstance(each, InvalidField))
