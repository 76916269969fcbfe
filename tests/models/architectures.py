"""Small random models of many architectures, made on the fly, and how to load and run them."""

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTextEncoding,
)

from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import load_model
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler

BLOCK = 16
COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
LONG = {"max_position_embeddings": 256}
GROUPED = COMMON | LONG | {"num_key_value_heads": 2}
WINDOWED = GROUPED | {"sliding_window": 32, "head_dim": 16}
MOE = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4}
GPT = {"vocab_size": 199, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
DEEPSEEK = GROUPED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LOCAL = COMMON | LONG | {"num_hidden_layers": 4, "local_attention": 32, "global_attn_every_n_layers": 2}
DECODERS = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "qwen3_moe": MOE | {"head_dim": 16},
    "mistral": WINDOWED,
    "mixtral": MOE,
    "gemma2": WINDOWED | {"query_pre_attn_scalar": 16},
    "gemma3_text": WINDOWED | {"query_pre_attn_scalar": 16},
    "gpt_oss": MOE | WINDOWED | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "phi": COMMON | LONG,
    "phi3": GROUPED,
    "gpt2": GPT,
    "gpt_neox": COMMON | LONG,
    "opt": COMMON | LONG | {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED | {"logit_scale": 0.3},
    "granite": GROUPED | {"logits_scaling": 4.0},
    "smollm3": GROUPED,
    "glm": GROUPED | {"head_dim": 16},
    "glm4": GROUPED | {"head_dim": 16},
    "stablelm": GROUPED,  # does not hand keywords down to its attention
    "starcoder2": GROUPED,
    "gptj": GPT | {"rotary_dim": 8},
    "deepseek_v3": DEEPSEEK,  # value heads narrower than keys
}
SHORT = COMMON | {"max_position_embeddings": 128}
ROBERTA = SHORT | {"pad_token_id": 1}
ENCODERS = {
    "bert": SHORT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "data2vec-text": ROBERTA,
    "distilbert": {"vocab_size": 199, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
    | {"max_position_embeddings": 128},
    "electra": SHORT | {"embedding_size": 64},
    "albert": SHORT | {"embedding_size": 32},
    "ernie": SHORT,
    "layoutlm": SHORT,  # does not say whether it is causal
    "esm": SHORT | {"position_embedding_type": "rotary"},  # nor which layer it is
    "eurobert": GROUPED,
    "modernbert": LOCAL,  # window on both sides, halved
    "gemma3_text": WINDOWED | {"query_pre_attn_scalar": 16, "use_bidirectional_attention": True},
    "qwen2": GROUPED | {"is_causal": False},
    "nomic_bert": SHORT,
    "gte": SHORT,
    "jina_embeddings_v3": SHORT,
}
T5 = {"vocab_size": 199, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "n_positions": 128}
PADDED = {
    "mpnet": ROBERTA,
    "deberta": SHORT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": SHORT
    | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32}
    | {"position_biased_input": False, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "roformer": SHORT,
    "rembert": SHORT | {"input_embedding_size": 32, "output_embedding_size": 32},
    "megatron-bert": SHORT,
    "big_bird": SHORT | {"attention_type": "original_full"},
    "longformer": ROBERTA | {"attention_window": [16, 16]},
    "xlm": {"vocab_size": 199, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
}
# Padding changes rows of these even under a mask, so each text has a forward of its own.
ONE_BY_ONE = {
    "convbert": SHORT | {"embedding_size": 64},
    "fnet": SHORT,
    "mobilebert": SHORT | {"embedding_size": 64},  # reads the neighbours' embeddings
}


# Random models start with weights so small that attention hardly matters; four times as large, mistakes show. Not so
# T5, whose scores are not divided by the root of the width, and routers, which rounding makes choose other experts.
SCALE = 4.0
SCALES = {"t5": 1.0, "mt5": 1.0, "umt5": 1.0, "deepseek_v3": 2.0, "gpt_oss": 2.0}


def save(folder, model_type, fields, factory):
    """A model of ``model_type`` with seeded random weights, as a folder."""
    torch.manual_seed(0)
    model = factory.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(SCALES.get(model_type, SCALE))
    model.save_pretrained(folder)


def factory_of(model_type, is_decoder=False):
    if is_decoder:
        return AutoModelForCausalLM
    return AutoModelForTextEncoding if model_type in ("t5", "mt5", "umt5") else AutoModel


def eager_body(folder, factory, dtype=torch.float32):
    """The independent reference: transformers' own model with its own plain attention."""
    return factory.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().base_model


def eager_rows(body, ids):
    """Hidden rows [L, H] of one text alone."""
    alone = torch.tensor([ids])
    return body(input_ids=alone, attention_mask=torch.ones_like(alone)).last_hidden_state[0]


def parts(loaded, budget=96, num_blocks=128):
    """(runner, scheduler, builder) as serving puts them together, with a budget that cuts prompts."""
    cache = pool = None
    if loaded.is_causal:
        cache = KVCache(loaded.cache_shapes, num_blocks, BLOCK, loaded.dtype, "cpu")
        pool = BlockPool(num_blocks, BLOCK)
    builder = BatchBuilder(BLOCK if loaded.is_causal else 0, "cpu", loaded.takes_token_types)
    return ModelRunner(loaded, cache), Scheduler(pool, budget, 8), builder


def load(folder, dtype="float32", deterministic=False):
    return load_model(folder, dtype, "cpu", deterministic)
