"""The models that server and peers are measured with. The parent makes them; the peers get their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from load import DECODER, ENCODER, RERANKER

from pyruntime.model.demo import demo_gguf, demo_models, minilm_folder


def bench_models(made: Path, say: Callable[[str], None]) -> dict[str, str]:
    """``encoder``, ``decoder``, ``reranker`` (folders), ``gguf`` (file) and ``made``, where what is made here is kept.

    The cross-encoder is the demo encoder's body under a random head, so that every peer can run the same weights:
    no package of a registry brings a small one, and what ranking costs does not depend on what the head has learnt.
    """
    made = made.absolute()
    made.mkdir(parents=True, exist_ok=True)
    demo = demo_models(say)
    gguf = next(made.glob("gemma*.gguf"), None) or demo_gguf(made)
    reranker = made / RERANKER
    if not (reranker / "tokenizer.json").exists():
        make_reranker(made)
    return {
        "encoder": demo[ENCODER],
        "decoder": demo[DECODER],
        "reranker": str(reranker),
        "gguf": str(gguf),
        "made": str(made),
    }


def make_reranker(folder: Path) -> Path:
    """A cross-encoder in ``folder``: the demo encoder's body, and a head of one label, random from a fixed seed.

    The head is drawn wide enough that logits differ by about one: drawn as transformers draws it, all documents would
    score nearly the same and no error would show.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(minilm_folder(), num_labels=1)
    head = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.classifier.weight.normal_(0.0, 2.0, generator=head)
    model.save_pretrained(folder / RERANKER)
    AutoTokenizer.from_pretrained(minilm_folder()).save_pretrained(folder / RERANKER)
    return folder / RERANKER
