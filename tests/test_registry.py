"""Model names to models, in each state."""

from __future__ import annotations

import pytest

from pyruntime.errors import AlreadyExists, CapabilityMissing, InvalidField, ModelFailed, NotFound, NotReady
from pyruntime.registry import ModelRegistry, ModelState, ModelStatus
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


def states(registry: ModelRegistry) -> dict[str, ModelState]:
    return {each.name: each.state for each in registry.statuses()}


def test_by_name():
    registry = registry_of(a={Capability.EMBED}, b=None, c="torn")
    assert registry.resolve("a", Capability.EMBED).info.name == "a"
    assert registry.resolve("a", None).info.name == "a"
    for name, error in (("a", CapabilityMissing), ("b", NotReady), ("c", ModelFailed), ("d", NotFound)):
        with pytest.raises(error):
            registry.resolve(name, Capability.GENERATE)
    assert states(registry) == {"a": ModelState.SERVING, "b": ModelState.LOADING, "c": ModelState.FAILED}
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
    registry = registry_of(a=None, b={Capability.EMBED}, c=None)
    registry.set_unloading("c")
    for name, state in (("a", "loading"), ("b", "serving"), ("c", "unloading")):
        with pytest.raises(AlreadyExists, match=f"'{name}' is {state}"):
            registry.declare(name)


def test_a_name_that_failed_may_be_tried_again():
    registry = registry_of(a="torn")
    registry.declare("a", "/better")
    assert registry.statuses() == [ModelStatus("a", "/better")]
    assert registry.set_serving("a", fake_model("a", {Capability.EMBED}))
    assert registry.resolve("a", None).info.name == "a"


def test_a_model_that_joins_later_makes_nobody_wait():
    registry = registry_of(a={Capability.EMBED})
    registry.declare("b", is_late=True)
    assert not registry.is_starting
    assert registry.resolve("", Capability.EMBED).info.name == "a"
    with pytest.raises(NotReady):
        registry.resolve("b", None)


def test_unloading_turns_requests_away_and_then_frees_the_name():
    registry = registry_of(a={Capability.EMBED}, b={Capability.EMBED}, c=None)
    before = registry.set_unloading("a")
    assert (before.state, before.model.info.name) == (ModelState.SERVING, "a")
    with pytest.raises(NotReady, match="unloaded"):
        registry.resolve("a", None)
    assert [model.info.name for model in registry.serving()] == ["b"]
    # What was meant for the model that is on its way out changes nothing.
    assert not registry.set_failed("a", "late news")
    registry.remove("a")
    assert not registry.set_failed("a", "late news")
    for name in ("a", "nobody"):
        with pytest.raises(NotFound):
            registry.resolve(name, None)
        with pytest.raises(NotFound):
            registry.set_unloading(name)
    assert registry.set_unloading("c").model is None
    assert not registry.set_serving("c", fake_model("c", {Capability.EMBED}))
    assert registry.resolve("", None).info.name == "b"


def test_drain_refuses_everything():
    registry = registry_of(a={Capability.EMBED})
    registry.drain()
    for name in ("a", "", "nobody"):
        with pytest.raises(NotReady):
            registry.resolve(name, None)


def test_listeners_hear_of_each_change():
    registry, calls = ModelRegistry(), []

    def listener() -> None:
        calls.append(states(registry))  # must not deadlock

    registry.add_listener(listener)
    registry.declare("a")
    registry.set_failed("a", "torn")
    registry.drain()
    registry.remove_listener(listener)
    registry.declare("b")
    assert calls == [{"a": ModelState.LOADING}, {"a": ModelState.FAILED}, {"a": ModelState.FAILED}]
