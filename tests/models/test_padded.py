"""The padded forward: how texts are grouped, that neighbours and padding tokens do not matter, and planted mistakes."""

import random

import pytest
import torch

from pyruntime.errors import ModelLoadError
from pyruntime.model import attention, packed
from pyruntime.model.padded import MOST_PADDING, MOST_SCORES, length_groups
from pyruntime.self_check import run_batched, self_check
from tests.models.architectures import (
    ENCODERS,
    LOCAL,
    PADDED,
    eager_body,
    eager_rows,
    factory_of,
    load,
    parts,
    save,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders("mpnet") → a saved random model, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save(made[name], name, (PADDED | ENCODERS | {"modernbert": LOCAL})[name], factory_of(name))
        return made[name]

    return get


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_text_once_within_their_bounds(seed):
    generator = random.Random(seed)
    longest = generator.choice([3, 100, 3000])
    lengths = [generator.randrange(1, longest) for _ in range(generator.randrange(1, 60))]
    groups = length_groups(lengths, one_by_one=False)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[index] for index in group]
        assert max(own) * len(own) - sum(own) <= MOST_PADDING
        assert len(own) == 1 or max(own) ** 2 * len(own) <= MOST_SCORES
    assert all(len(group) == 1 for group in length_groups(lengths, one_by_one=True))


@pytest.mark.parametrize("name", ["mpnet", "deberta-v2", "t5", "roberta"])
def test_a_padding_token_within_a_text_is_read_as_transformers_reads_it(folders, name):
    """In the middle, first, last and alone; RoBERTa's family does not count it as a position."""
    loaded = load(folders(name))
    body = eager_body(folders(name), factory_of(name))
    pad = loaded.config.pad_token_id
    texts = [[5, pad, 7, 8], [pad, 9, 10], [11, 12, pad], [pad, 4], [20, pad, pad, 21, 22, 23, 24], [30, 31]]
    for ids, rows in zip(texts, run_batched(*parts(loaded), texts), strict=True):
        torch.testing.assert_close(rows, eager_rows(body, ids), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["mpnet", "deberta-v2"])
def test_deterministic_rows_are_the_same_bits_in_any_company(folders, name):
    loaded = load(folders(name), deterministic=True)
    generator = random.Random(1)
    texts = [[generator.randrange(3, 190) for _ in range(length)] for length in (1, 7, 20, 21, 60)]
    alone = [run_batched(*parts(loaded), [ids])[0] for ids in texts]
    for _ in range(3):
        company = [[generator.randrange(3, 190) for _ in range(generator.randrange(1, 40))] for _ in range(6)]
        together = texts + company
        order = list(range(len(together)))
        generator.shuffle(order)
        rows = dict(zip(order, run_batched(*parts(loaded), [together[place] for place in order]), strict=True))
        assert all(torch.equal(rows[place], alone[place]) for place in range(len(texts)))


@pytest.mark.parametrize("name", ["mpnet", "deberta-v2", "t5"])
def test_a_wrong_padding_mask_is_caught(folders, monkeypatch, name):
    """Padding that is visible, as when a model got no mask."""
    loaded = load(folders(name))
    body = loaded.body.forward

    def unmasked(input_ids, attention_mask, **keywords):
        return body(input_ids=input_ids, attention_mask=torch.ones_like(attention_mask), **keywords)

    monkeypatch.setattr(loaded.body, "forward", unmasked)
    with pytest.raises(ModelLoadError, match="padded forward differs from eager"):
        self_check(*parts(loaded))


@pytest.mark.parametrize("side", ["window_left", "window_right"])
@pytest.mark.parametrize("name", ["modernbert", "gemma3_text"])
def test_a_wrong_two_sided_window_is_caught(folders, monkeypatch, name, side):
    """One key too few on one side."""
    loaded = load(folders(name))
    right = attention.attention_ops.packed_attention

    def narrower(*tensors, **options):
        options[side] -= options[side] > 0
        return right(*tensors, **options)

    monkeypatch.setattr(attention.attention_ops, "packed_attention", narrower)
    with pytest.raises(ModelLoadError, match="packed forward differs from eager"):
        self_check(*parts(loaded))


def test_positions_that_count_padding_tokens_are_caught(folders, monkeypatch):
    loaded = load(folders("roberta"))
    monkeypatch.setattr(packed, "_positions", lambda batch, offset: batch.positions + offset)
    with pytest.raises(ModelLoadError, match="on a text of 20 tokens the packed forward differs from eager"):
        self_check(*parts(loaded))
