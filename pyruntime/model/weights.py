"""Which transformers class a folder asks for, and its weights in it, all of them or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from pyruntime.errors import ModelLoadError
from pyruntime.model.attention import IMPLEMENTATION

CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
PLAIN_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining")
# An encoder saved without the pooler that transformers would add, or with heads that embedding does not use.
UNUSED_WEIGHTS = ("pooler.", "cls.", "lm_head.")


def load_weights(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    if architecture.endswith(CAUSAL_SUFFIXES):
        loader: Any = AutoModelForCausalLM
    elif architecture.endswith(PLAIN_SUFFIXES):
        loader = AutoModel
    else:
        served = [f"…{suffix}" for suffix in (*CAUSAL_SUFFIXES, *PLAIN_SUFFIXES)]
        raise ModelLoadError(f"{folder}: architecture {architecture} is not served; served: {served}")
    model, report = loader.from_pretrained(
        folder, dtype=dtype, attn_implementation=IMPLEMENTATION, output_loading_info=True
    )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(UNUSED_WEIGHTS))
    mismatched = sorted(map(str, report.get("mismatched_keys") or []))
    if missing or mismatched:
        raise ModelLoadError(f"{folder}: the weights do not fit the config; missing {missing}, mismatched {mismatched}")
    return model
