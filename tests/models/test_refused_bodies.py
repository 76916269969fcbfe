"""Bodies that cannot be served right: each refused at load with the reason and a name."""

import functools
import json
from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from pyruntime.errors import ModelLoadError
from pyruntime.model import attention, fused_layers, loader
from pyruntime.model.loader import load_model
from pyruntime.self_check import self_check
from tests.models.architectures import COMMON, DECODERS, ENCODERS, GROUPED, LOCAL, SHORT, T5, load, parts, save

BLOOM = {"vocab_size": 199, "hidden_size": 64, "n_layer": 2, "n_head": 4}
REFUSED = {
    "bloom": (BLOOM, AutoModelForCausalLM, "BloomForCausalLM is not served: 0 of 2 layers"),
    "bloom as a plain body": (BLOOM, AutoModel, "BloomModel is not served: 0 of 2 layers"),
    "falcon": (COMMON | {"alibi": True}, AutoModelForCausalLM, "FalconForCausalLM: its attention classes are its own"),
    "mamba": (
        {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2},
        AutoModelForCausalLM,
        "MambaForCausalLM is not served",
    ),
    "t5": (T5, AutoModel, "T5Model is not served: an encoder-decoder; its encoder half can be"),
    "t5 to generate": (T5, AutoModelForSeq2SeqLM, "T5ForConditionalGeneration"),
    # A dense layer stands between its last hidden row and its output matrix.
    "modernbert-decoder": (LOCAL, AutoModelForCausalLM, "logits of the output head differ"),
    "canine": (SHORT, AutoModel, "CanineModel is not served: it has no table of input embeddings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_bodies_are_refused_by_name(tmp_path, name):
    fields, factory, reason = REFUSED[name]
    save(tmp_path, name.split()[0], fields, factory)
    with pytest.raises(ModelLoadError, match=reason):
        self_check(*parts(load(tmp_path)))


def test_remote_code_is_never_run(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "modeling_new.py").write_text(f"open({str(marker)!r}, 'w')\n")
    fields = {"model_type": "new", "architectures": ["NewModel"], "auto_map": {"AutoModel": "modeling_new.NewModel"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=r"config\.json: model_type 'new' .* requires remote code .*modeling_new"):
        load(tmp_path)
    assert not marker.exists()


def test_remote_code_beside_a_class_of_transformers_own_is_not_run(tmp_path):
    save(tmp_path, "bert", SHORT, AutoModel)
    marker = tmp_path / "ran"
    (tmp_path / "modeling_bert.py").write_text(f"open({str(marker)!r}, 'w')\n")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["auto_map"] = {"AutoConfig": "modeling_bert.BertConfig", "AutoModel": "modeling_bert.BertModel"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load(tmp_path).architecture == "BertModel"
    assert not marker.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "no-such-model"}', '{"architectures": ["BertModel"]}'])
def test_a_broken_config_is_refused_with_its_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    save(tmp_path, "llama", GROUPED, AutoModelForCausalLM)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="missing"):
        load(tmp_path)


def test_a_wrong_packed_forward_is_caught(tmp_path, monkeypatch):
    """The self-check must be able to fail: an off-by-one window is enough."""
    save(tmp_path, "mistral", DECODERS["mistral"], AutoModelForCausalLM)
    right = attention.attention_ops.paged_attention

    def narrower(*args, window_left, **options):
        return right(*args, window_left=window_left - 1, **options)

    monkeypatch.setattr(attention.attention_ops, "paged_attention", narrower)
    monkeypatch.setattr(loader, "fuse_layers", lambda *_: 0)
    with pytest.raises(ModelLoadError, match="differs from eager"):
        self_check(*parts(load(tmp_path)))


def test_a_wrong_fused_layer_is_caught(tmp_path, monkeypatch):
    """By the self-check too, should a layer go wrong that was right when it was tried."""
    save(tmp_path, "mistral", DECODERS["mistral"], AutoModelForCausalLM)
    monkeypatch.setattr(fused_layers, "put_stack", lambda *_: False)
    loaded, right = load(tmp_path), fused_layers._Fused.__call__

    def narrower(layer, *args):
        numbers = layer._numbers
        place = numbers.index(DECODERS["mistral"]["sliding_window"] - 1)
        layer._numbers = (*numbers[:place], numbers[place] - 1, *numbers[place + 1 :])
        try:
            return right(layer, *args)
        finally:
            layer._numbers = numbers

    monkeypatch.setattr(fused_layers._Fused, "__call__", narrower)
    with pytest.raises(ModelLoadError, match="differs from eager"):
        self_check(*parts(loaded))


def test_a_wrong_stack_of_layers_is_caught(tmp_path, monkeypatch):
    """Likewise where all layers are one op: ``others`` takes the place of the stack that was tried."""
    save(tmp_path, "mistral", DECODERS["mistral"], AutoModelForCausalLM)
    made = []

    class Noted(fused_layers.DecoderStack):
        def __init__(self, layers):
            super().__init__(layers)
            made.append((self, layers))

    monkeypatch.setattr(fused_layers, "DecoderStack", Noted)
    loaded = load(tmp_path)
    [(stack, layers)] = made
    self_check(*parts(loaded))
    others = Noted([replace(layer, window_left=layer.window_left - 1) for layer in layers])
    stack._number = others._number
    with pytest.raises(ModelLoadError, match="differs from eager"):
        self_check(*parts(loaded))


def of_the_decoder(*args, window_left, causal=True, change, **options):
    options |= {"window_left": window_left, "causal": causal} | change(window_left)
    return PAGED(*args, **options)


def of_the_encoder(q, k, v, starts, change, **options):
    return PACKED(q, k, v, starts[[0, -1]].contiguous() if change is None else starts, **options | (change or {}))


PAGED, PACKED = attention.attention_ops.paged_attention, attention.attention_ops.packed_attention
WRONG = {
    "no window": ("mistral", lambda window: {"window_left": -1}),
    "one key less": ("mistral", lambda window: {"window_left": window - 1}),
    "sees what comes": ("mistral", lambda window: {"causal": False}),
    "sees other texts": ("bert", None),
    "sees nothing that comes": ("bert", {"causal": True, "window_right": -1}),
    "a window": ("bert", {"window_left": 8, "window_right": 8}),
}


FINE = ("one key less", "a window")  # hidden by the roundings of bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in WRONG), *((n, "bfloat16") for n in WRONG if n not in FINE)]
)
def test_a_wrong_forward_is_caught_in_int8_too(tmp_path, monkeypatch, name, dtype):
    """Whose steps differ between two right forwards: where they do not, it must be as near as without."""
    model_type, change = WRONG[name]
    is_decoder = model_type in DECODERS
    fields = (DECODERS if is_decoder else ENCODERS)[model_type]
    save(tmp_path, model_type, fields, AutoModelForCausalLM if is_decoder else AutoModel)
    for fuse in ("fuse_layers", "fuse_encoder_layers"):
        monkeypatch.setattr(loader, fuse, lambda *_: 0)
    loaded = load_model(tmp_path, dtype, "cpu", quantization="int8")
    assert self_check(*parts(loaded)) > 0.999
    wrong = functools.partial(of_the_decoder if is_decoder else of_the_encoder, change=change)
    monkeypatch.setattr(attention.attention_ops, "paged_attention" if is_decoder else "packed_attention", wrong)
    with pytest.raises(ModelLoadError, match="differs from eager"):
        self_check(*parts(loaded))


def test_a_packed_forward_that_leaks_between_texts_is_not_taken(tmp_path, monkeypatch):
    """Falls back to padding, which this mistake does not touch."""
    save(tmp_path, "bert", ENCODERS["bert"], AutoModel)
    right = attention.attention_ops.packed_attention

    def leaking(q, k, v, starts, **options):
        return right(q, k, v, starts[[0, -1]].contiguous(), **options)

    monkeypatch.setattr(attention.attention_ops, "packed_attention", leaking)
    assert load(tmp_path).execution_path.value == "padded"
