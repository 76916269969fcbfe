"""What the servicers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyruntime.config import Settings
from pyruntime.errors import InvalidField, InvalidFields, PyruntimeError
from pyruntime.registry import ModelRegistry
from pyruntime.service.inputs import TextWorkers

T = TypeVar("T")


@dataclass
class ServiceRoom:
    """The collaborators of every servicer."""

    registry: ModelRegistry
    settings: Settings
    workers: TextWorkers = field(default_factory=TextWorkers)

    def check_inputs(self, field_name: str, count: int) -> None:
        """A list that one request may carry: neither empty nor too long."""
        most = self.settings.max_inputs_per_request
        if not 1 <= count <= most:
            raise InvalidField(field_name, f"has {count} entries; allowed: 1 to {most}")


def good_ones(items: list[T | InvalidField]) -> list[T]:
    """The items without an error, in order. When there are none the request is refused whole: ``InvalidFields``."""
    good = [item for item in items if not isinstance(item, InvalidField)]
    if not good:
        raise InvalidFields([item for item in items if isinstance(item, InvalidField)])
    return good


def refuse_if_all_failed(results: list[Any]) -> None:
    """Raises the first result's error when every result has one."""
    errors: list[PyruntimeError] = [result.error for result in results if result.error is not None]
    if errors and len(errors) == len(results):
        raise errors[0]
