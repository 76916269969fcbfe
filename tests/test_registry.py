"""Model names to models, in each state."""

from __future__ import annotations

import pytest

from pyruntime.errors import CapabilityMissing, InvalidField, ModelFailed, NotFound, NotReady
from pyruntime.registry import ModelRegistry, ModelState
from pyruntime.types import Capability
from tests.fakes import fake_model


def registry_of(**capabilities: set[Capability] | str | None) -> ModelRegistry:
    """Each name with capabilities (serving), a text (failed) or None (loading)."""
    registry = ModelRegistry()
    for name, what in capabilities.items():
        registry.declare(name)
        if isinstance(what, str):
            registry.set_failed(name, what)
        elif what is not None:
            registry.set_serving(name, fake_model(name, what))
    return registry


def test_by_name():
    registry = registry_of(a={Capability.EMBED}, b=None, c="torn")
    assert registry.resolve("a", Capability.EMBED).info.name == "a"
    assert registry.resolve("a", None).info.name == "a"
    for name, error in (("a", CapabilityMissing), ("b", NotReady), ("c", ModelFailed), ("d", NotFound)):
        with pytest.raises(error):
            registry.resolve(name, Capability.GENERATE)
    assert registry.states() == {"a": ModelState.SERVING, "b": ModelState.LOADING, "c": ModelState.FAILED}
    assert [model.info.name for model in registry.serving()] == ["a"]


def test_empty_name_means_the_only_one():
    registry = registry_of(a={Capability.EMBED}, b={Capability.EMBED, Capability.GENERATE}, c="torn")
    assert registry.resolve("", Capability.GENERATE).info.name == "b"
    with pytest.raises(InvalidField, match="a, b"):
        registry.resolve("", Capability.EMBED)
    with pytest.raises(CapabilityMissing):
        registry.resolve("", Capability.SCORE)


def test_empty_name_waits_for_models_that_may_be_candidates():
    registry = registry_of(a={Capability.EMBED}, b=None)
    with pytest.raises(NotReady):
        registry.resolve("", Capability.EMBED)
    registry.set_failed("b", "torn")
    assert registry.resolve("", Capability.EMBED).info.name == "a"


def test_a_name_is_declared_once():
    registry = registry_of(a=None)
    with pytest.raises(ValueError, match="'a'"):
        registry.declare("a")


def test_drain_refuses_everything():
    registry = registry_of(a={Capability.EMBED})
    registry.drain()
    for name in ("a", "", "nobody"):
        with pytest.raises(NotReady):
            registry.resolve(name, None)


def test_listeners_hear_of_each_change():
    registry, calls = ModelRegistry(), []

    def listener() -> None:
        calls.append(registry.states())  # must not deadlock

    registry.add_listener(listener)
    registry.declare("a")
    registry.set_failed("a", "torn")
    registry.drain()
    registry.remove_listener(listener)
    registry.declare("b")
    assert calls == [{"a": ModelState.LOADING}, {"a": ModelState.FAILED}, {"a": ModelState.FAILED}]
