"""One end-to-end run on the GPU: a small random decoder's forward there, packed, then every head by its kernel, against
transformers on the CPU in float64. The last line says how far they are apart; a difference too large is an error.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pyruntime.ops import pooling, sampling, scores

LENGTHS = (1, 5, 17, 64, 200, 3, 33)
LABELS = 5


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=5003, hidden_size=192, intermediate_size=384, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def answers_of_reference(prompts: list[torch.Tensor], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    model = make_model().double()
    hidden = [model.model(p[None]).last_hidden_state[0] for p in prompts]
    logits = torch.stack([model.lm_head(h[-1]) for h in hidden])
    mean = torch.stack([h.mean(0) for h in hidden])
    chosen = logits.gather(1, labels)
    return {
        "mean": torch.nn.functional.normalize(mean, dim=-1),
        "scores": torch.softmax(chosen, -1),
        "probabilities": torch.softmax(logits, -1).gather(1, labels),
        "greedy": logits.argmax(-1),
        "top_two_gap": logits.topk(2).values.diff(dim=-1)[:, 0].abs(),
    }


@torch.no_grad()
def answers_of_device(prompts: list[torch.Tensor], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    model = make_model().cuda()
    count = len(prompts)
    hidden = torch.cat([model.model(p[None].cuda()).last_hidden_state[0] for p in prompts])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    whole = lambda value, dtype: torch.full((count,), value, dtype=dtype).cuda()  # noqa: E731
    kinds, dimensions = whole(2, torch.int32), whole(hidden.shape[1], torch.int32)
    last = pooling.pool(hidden, starts, kinds * 0, dimensions, whole(False, torch.bool))
    weight, ids = model.lm_head.weight, labels.flatten().cuda()
    bounds = torch.arange(0, ids.numel() + 1, LABELS).int().cuda()
    ones = whole(1.0, torch.float32)
    sampled = sampling.sample(
        last @ weight.T, ones * 0, kinds * 0, ones, ones * 0, whole(1, torch.int64), whole(0, torch.int64), kinds * 0
    )
    return {
        "mean": pooling.pool(hidden, starts, kinds, dimensions, whole(True, torch.bool)).cpu(),
        "scores": scores.label_scores(last, weight, None, ids, bounds, ones).view(count, LABELS).cpu(),
        "probabilities": scores.label_probabilities(last, weight, None, ids, bounds).view(count, LABELS).cpu(),
        "greedy": sampled.cpu(),
    }


def main() -> None:
    torch.manual_seed(4)
    prompts = [torch.randint(0, 5003, (length,)) for length in LENGTHS]
    labels = torch.stack([torch.randperm(5003)[:LABELS] for _ in prompts])
    want, got = answers_of_reference(prompts, labels), answers_of_device(prompts, labels)
    # A near tie may fall either way.
    differ = (got["greedy"] != want["greedy"]) & (want["top_two_gap"] > 1e-3)
    gaps = {name: (got[name] - want[name]).abs().max().item() for name in ("mean", "scores", "probabilities")}
    text = ", ".join(f"{name} within {gap:.1e}" for name, gap in gaps.items())
    if differ.any() or max(gaps.values()) > 1e-4:
        raise SystemExit(f"{int(differ.sum())} greedy tokens differ, {text}")
    print(f"{len(prompts)} prompts: greedy tokens equal, {text}")


if __name__ == "__main__":
    main()
