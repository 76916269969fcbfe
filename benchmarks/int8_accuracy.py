"""What --quantization int8 costs in accuracy on real weights: python benchmarks/int8_accuracy.py

Sentences of docs/ embedded by MiniLM, and docs/ read on by Gemma 3 270M, against float32.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import torch

from pyruntime.config import Settings
from pyruntime.model.demo import GEMMA_NAME, MINILM_NAME, demo_models
from pyruntime.model.loader import LoadedModel, load_model
from pyruntime.model.probe import eager_attention
from pyruntime.serving import load_served_model
from pyruntime.tokenization import Tokenizer
from pyruntime.types import EmbedRequest, PoolingType

KINDS = (("none", "float32"), ("none", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16"))
NUM_TEXTS, NUM_TOKENS, NUM_PARTS = 200, 512, 4
DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    folders = demo_models(print)
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(DOCS.glob("*.md")))
    sentences = [part for part in re.split(r"(?<=[.:])\s+", text) if 30 < len(part) < 600][:NUM_TEXTS]
    vectors = {kind: asyncio.run(embed(folders[MINILM_NAME], sentences, *kind)) for kind in KINDS}
    for kind, own in vectors.items():
        cosines = (own * vectors[KINDS[0]]).sum(axis=1)
        print(MINILM_NAME, *kind, f"cosine to float32: least {cosines.min():.5f}, mean {cosines.mean():.5f}")
    ids = Tokenizer.from_pretrained(folders[GEMMA_NAME]).encode(text)
    parts = [ids[:1] + ids[start : start + NUM_TOKENS] for start in range(1, NUM_PARTS * NUM_TOKENS, NUM_TOKENS)]
    likeliest: dict[tuple[str, str], torch.Tensor] = {}
    for quantization, dtype in KINDS:
        loaded = load_model(Path(folders[GEMMA_NAME]), dtype, "cpu", quantization=quantization)
        losses, tokens = zip(*(read(loaded, part) for part in parts), strict=True)
        likeliest[quantization, dtype] = torch.cat(tokens)
        agreements = [
            f"{' '.join(kind)} {(likeliest[quantization, dtype] == other).double().mean():.1%}"
            for kind, other in list(likeliest.items())[:2]
        ]
        perplexity = torch.cat(losses).mean().exp()
        print(
            GEMMA_NAME, quantization, dtype, f"perplexity {perplexity:.3f}, likeliest token of", ", ".join(agreements)
        )


async def embed(folder: str, sentences: list[str], quantization: str, dtype: str) -> np.ndarray:
    settings = Settings.model_validate({"quantization": quantization, "dtype": dtype})
    model = load_served_model("model", folder, settings, lambda _: None)
    inputs = [ids[:256] for ids in model.tokenizer.encode_batch(sentences)]
    results, _ = await model.engine.embed(EmbedRequest(inputs, PoolingType.MEAN, True, 384))
    model.close()
    return np.stack([result.values for result in results])


@torch.inference_mode()
def read(loaded: LoadedModel, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token but the first how unlikely it was, and what the likeliest in its place was."""
    assert loaded.output_head is not None
    with eager_attention(loaded.model):
        hidden = loaded.body(input_ids=torch.tensor([ids[:-1]])).last_hidden_state[0]
    losses, tokens = [], []
    for rows, following in zip(hidden.split(64), torch.tensor(ids[1:]).split(64), strict=True):
        logits = loaded.output_head.logits(rows).float()
        losses.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
        tokens.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(tokens)


if __name__ == "__main__":
    main()
