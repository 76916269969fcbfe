"""Before a classifier is served: its head over gathered rows is compared with transformers' own logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from pyruntime.errors import ModelLoadError
from pyruntime.model.classifier import Classifier

# Allowed difference of a logit, in units of the largest logit of the texts (at least 1). Our head is float32 and
# transformers' has the model's dtype, whose rounding is all that may lie between them.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@torch.inference_mode()
def check_classifier(classifier: Classifier | None, model: Any, texts: list[list[int]]) -> None:
    """Raises ``ModelLoadError`` where a head reads other rows than ``Classifier.reads`` says.

    Called with ``model`` switched to eager attention. The body's rows of the same forward go to our head, so that
    nothing but the head is compared; ``self_check`` compares the body. ``texts``: token ids of each, 1 or more.
    """
    if classifier is None:
        return
    own, reference = zip(*(_both(classifier, model, ids) for ids in texts), strict=True)
    scale = max(1.0, *(logits.abs().max().item() for logits in reference))
    differences = [
        (a - b).abs().max().item() / scale if a.shape == b.shape else torch.inf
        for a, b in zip(own, reference, strict=True)
    ]
    largest = max(differences)
    allowed = ALLOWED[next(model.parameters()).dtype]
    if not largest <= allowed:
        raise ModelLoadError(
            f"{type(model).__name__} is not served: its logits differ from those of its head over the "
            f"{classifier.reads.value} hidden row by {largest:.3g} of the largest (allowed {allowed})"
        )


def _both(classifier: Classifier, model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Our logits and the model's, float32 [rows, labels], of one text."""
    seen: list[torch.Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _, __, output: seen.append(output[0][0]))
    try:
        tensor = torch.tensor([ids], device=next(model.parameters()).device)
        inputs = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        taken = inspect.signature(model.forward).parameters
        reference = model(**{name: inputs[name] for name in inputs if name in taken}).logits[0].float()
    finally:
        hook.remove()
    positions = classifier.positions(ids)
    rows = classifier.pool(seen[0][positions.start : positions.stop])
    own = classifier.conclude(classifier.logits(rows))
    return own, reference.reshape(-1, len(classifier.labels))
