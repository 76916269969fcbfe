"""Encoders whose forward is embeddings and fused layers: what is left out, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyruntime.model import short_bodies
from pyruntime.model.probe import eager_attention
from pyruntime.model.trial import whole_texts
from tests.models.test_encoder_layers import batch_of, encoder, fused, needs_panels, rows_of

SHORT = ("bert", "roberta", "electra")


def is_short(model: Any) -> bool:
    return "short_bodies" in type(model).forward.__code__.co_filename


def calls_of(model: Any, name: str) -> list[None]:
    """One entry a call of the module, from now on."""
    calls: list[None] = []
    model.get_submodule(name).register_forward_hook(lambda *_: calls.append(None))
    return calls


@needs_panels
@pytest.mark.parametrize("model_type", SHORT)
def test_a_short_forward_has_the_bits_of_the_whole_one(model_type: str, monkeypatch: Any) -> None:
    batch, whole, short = batch_of((10, 3, 1)), encoder(model_type), encoder(model_type)
    with monkeypatch.context() as patch:
        patch.setattr("pyruntime.model.encoder_layers.shorten", lambda *_: False)
        assert fused(whole) == 2
    assert fused(short) == 2
    assert (is_short(whole), is_short(short)) == (False, True)
    assert torch.equal(rows_of(short, batch), rows_of(whole, batch))


@needs_panels
def test_the_pooler_runs_where_transformers_itself_is_asked_and_not_in_a_packed_forward() -> None:
    model, batch = encoder("bert"), batch_of((10, 3))
    assert fused(model) == 2
    calls = calls_of(model, "pooler")
    rows_of(model, batch)
    assert not calls
    ids = batch.input_ids[None, :10]
    with eager_attention(model):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert len(calls) == 1
    assert output.pooler_output.shape == (1, model.config.hidden_size)


@needs_panels
@pytest.mark.parametrize("name", ["embeddings", "encoder.layer.0", "encoder"])
def test_a_body_with_anything_in_between_stays_whole(name: str) -> None:
    model = encoder("bert")
    module = model.get_submodule(name)
    plain = type(module).forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = plain(module, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output * 2
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    if name == "embeddings":
        model.encoder.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    else:
        module.forward = doubled
    batch = batch_of((10, 3))
    want = rows_of(model, batch)
    fused(model)
    assert not is_short(model)
    torch.testing.assert_close(rows_of(model, batch), want, atol=5e-4, rtol=5e-5)


@needs_panels
def test_a_body_of_which_one_layer_is_not_fused_stays_whole() -> None:
    model = encoder("bert")
    model.encoder.layer[1].gain = torch.nn.Parameter(torch.ones(1))
    assert fused(model) == 1
    assert not is_short(model)


def test_token_types_go_to_the_embeddings() -> None:
    given = short_bodies._given(whole_texts((3, 2), torch.arange(5)), 2)
    assert [sorted(each) for each in given] == [
        ["input_ids", "position_ids"],
        ["input_ids", "position_ids", "token_type_ids"],
    ]
    assert given[0]["position_ids"].min() == 2
