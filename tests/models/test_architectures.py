"""Small random models of many architectures: loaded, probed and compared with transformers eager, chunked and paged."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from pyruntime.errors import ModelLoadError
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import load_model
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.self_check import check_scheduler, self_check

COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
WINDOWED = GROUPED | {"sliding_window": 32, "head_dim": 16}
MOE = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4}
DECODERS = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "qwen3_moe": MOE | {"head_dim": 16},
    "mistral": WINDOWED,
    "mixtral": MOE,
    "gemma2": WINDOWED | {"query_pre_attn_scalar": 16},
    "gemma3_text": WINDOWED | {"query_pre_attn_scalar": 16},
    "gpt_oss": MOE | WINDOWED,
    "phi": COMMON | {"max_position_embeddings": 256},
    "phi3": GROUPED,
    "gpt2": {"vocab_size": 199, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": COMMON | {"max_position_embeddings": 256},
    "opt": COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 256},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED | {"logit_scale": 0.3},
    "granite": GROUPED | {"logits_scaling": 4.0},
    "smollm3": GROUPED,
    "glm": GROUPED | {"head_dim": 16},
    "glm4": GROUPED | {"head_dim": 16},
}
SHORT = {"max_position_embeddings": 128}
ENCODERS = {
    "bert": COMMON | SHORT,
    "roberta": COMMON | SHORT | {"pad_token_id": 1},
    "xlm-roberta": COMMON | SHORT | {"pad_token_id": 1},
    "camembert": COMMON | SHORT | {"pad_token_id": 1},
    "distilbert": {"vocab_size": 199, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96} | SHORT,
    "electra": COMMON | SHORT | {"embedding_size": 64},
    "albert": COMMON | SHORT | {"embedding_size": 32},
    "eurobert": GROUPED,
}
REFUSED = {
    "mpnet": (COMMON | SHORT | {"pad_token_id": 1}, "AutoModel"),
    "bloom": ({"vocab_size": 199, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "AutoModelForCausalLM"),
    "stablelm": (GROUPED, "AutoModelForCausalLM"),
    "falcon": (COMMON | {"alibi": True}, "AutoModelForCausalLM"),
}


def save(folder, model_type, fields, factory):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model = factory.from_config(config).eval()
    # Random models start with weights so small that attention hardly matters; these make mistakes visible.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    model.save_pretrained(folder)


def check(folder, dtype):
    loaded = load_model(folder, dtype, "cpu")
    scheduler, num_blocks = check_scheduler(loaded, block_size=16)
    cache = None
    if loaded.is_causal:
        cache = KVCache(loaded.cache_shapes, num_blocks, 16, loaded.dtype, "cpu")
    builder = BatchBuilder(16 if loaded.is_causal else 0, "cpu", loaded.takes_token_types)
    return loaded, self_check(ModelRunner(loaded, cache), scheduler, builder)


@pytest.mark.parametrize("model_type", DECODERS)
def test_decoder(tmp_path, model_type):
    save(tmp_path, model_type, DECODERS[model_type], AutoModelForCausalLM)
    loaded, cosine = check(tmp_path, "float32")
    assert loaded.is_causal and loaded.output_head is not None
    assert cosine >= 0.99999


@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoder(tmp_path, model_type):
    save(tmp_path, model_type, ENCODERS[model_type], AutoModel)
    loaded, cosine = check(tmp_path, "float32")
    assert not loaded.is_causal and loaded.output_head is None
    assert cosine >= 0.99999


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_does_not_go_through_the_packed_attention_is_refused_by_name(tmp_path, model_type):
    fields, factory = REFUSED[model_type]
    save(tmp_path, model_type, fields, {"AutoModel": AutoModel, "AutoModelForCausalLM": AutoModelForCausalLM}[factory])
    with pytest.raises(ModelLoadError, match=r"(?i)" + model_type):
        check(tmp_path, "float32")


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    save(tmp_path, "llama", GROUPED, AutoModelForCausalLM)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="missing"):
        load_model(tmp_path, "float32", "cpu")


def test_a_classifier_is_refused_by_name(tmp_path):
    from transformers import AutoModelForSequenceClassification

    save(tmp_path, "bert", COMMON | SHORT, AutoModelForSequenceClassification)
    with pytest.raises(ModelLoadError, match="BertForSequenceClassification is not served"):
        load_model(tmp_path, "float32", "cpu")


def test_a_wrong_packed_forward_is_caught(tmp_path, monkeypatch):
    """The self-check must be able to fail: an off-by-one window is enough."""
    from pyruntime.model import attention

    save(tmp_path, "mistral", WINDOWED, AutoModelForCausalLM)
    right = attention.attention_ops.paged_attention

    def narrower(*args, window_left, **options):
        return right(*args, window_left=window_left - 1, **options)

    monkeypatch.setattr(attention.attention_ops, "paged_attention", narrower)
    with pytest.raises(ModelLoadError, match="differs from eager"):
        check(tmp_path, "float32")
