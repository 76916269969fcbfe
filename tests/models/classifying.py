"""Small random classifiers, run through scheduler, batch builder, runner and heads as the engine would."""

import random

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from pyruntime.heads.dispatch import Heads
from pyruntime.model.classifier_settings import read_cross_encoder_settings
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.runner import ModelRunner
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ClassifyRequest, Task

BLOCK = 16
VOCABULARY = 199
FACTORIES = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ROBERTA = PLAIN | {"pad_token_id": 1}
GROUPED = PLAIN | {"num_key_value_heads": 2, "max_position_embeddings": 200}
# No layer of these starts or ends a text by itself, and the ids must lie inside the small vocabulary.
MARKED = GROUPED | dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)


def save(folder, model_type, head, num_labels=3, scale=4.0, **fields):
    """A model with weights large enough that a wrong row or mask shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, num_labels=num_labels, **fields)
    model = FACTORIES[head].from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(scale)
        elif parameter.abs().max() == 0:  # biases start as zero, and one that is left out would not show
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)


def eager(folder, head):
    """transformers' own model in float32: the independent reference."""
    model = FACTORIES[head].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def texts(lengths, seed=0):
    """Random ids of these lengths, special ones left out."""
    generator = random.Random(seed)
    return [[generator.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def pair_types(ids):
    """Token types of a pair whose second text begins after a third."""
    return [int(3 * place >= len(ids)) for place in range(len(ids))]


def classify(loaded, folder, sequences, step_tokens=96):
    """Outputs of the sequences in their order; those with a parent stand behind it."""
    blocks = BlockPool(256, BLOCK) if loaded.is_causal else None
    cache = KVCache(loaded.cache_shapes, 256, BLOCK, loaded.dtype, "cpu") if loaded.is_causal else None
    scheduler = Scheduler(blocks, step_tokens, 64)
    builder = BatchBuilder(BLOCK if loaded.is_causal else 0, "cpu", loaded.takes_token_types)
    runner, heads = ModelRunner(loaded, cache), Heads(loaded, read_cross_encoder_settings(folder))
    outputs = {}
    scheduler.add(sequences)
    while scheduler.has_work:
        plan = scheduler.schedule()
        batch = builder.build(plan)
        read = iter(heads.read(runner.forward(batch), batch))
        scheduler.advance(plan)
        for rows in batch.rows:
            if rows.reads:
                outputs[rows.sequence] = next(read)
                scheduler.finish(rows.sequence)
    if blocks is not None:
        assert blocks.num_used == 0
    return [outputs[sequence] for sequence in sequences if not sequence.is_prefix]


def sequence_of(ids, index=0, types=None, parent=None, reuses_prefix=True, **options):
    request = ClassifyRequest([list(ids)], **options)
    return Sequence(
        Task.CLASSIFY, list(ids), request, index, parent=parent, token_type_ids=types, reuses_prefix=reuses_prefix
    )
