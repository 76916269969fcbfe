"""Deterministic texts and token ids for parity tests."""

import random

WORDS = (
    "the of a river city quiet engine vector index grows small light answer question network server request cache "
    "between model token stream winter garden letter number green music history paper window travels north under"
).split()


def text(seed: int, num_words: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


def prompt_ids(tokenizer, length: int, seed: int = 0) -> list[int]:
    """Exactly ``length`` ids of running text, the first special tokens included."""
    ids = tokenizer.encode(text(seed, length + 8))
    assert len(ids) >= length
    return ids[:length]
