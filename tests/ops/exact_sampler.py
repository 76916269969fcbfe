"""The draw as csrc/shared/sampling_math.h defines it, by sorting, in numpy float32 and Python integers."""

from __future__ import annotations

import numpy as np
import torch

F = np.float32


def philox(seed: int, position: int, index: int) -> int:
    counter = [position & 0xFFFFFFFF, position >> 32, index, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0] << 32 | counter[1]


def decay(z: np.ndarray) -> np.ndarray:
    x = np.where(z < F(-87), F(-87), z).astype(F)
    biased = x * F(1.44269504088896341) + F(12582912)
    n = biased - F(12582912)
    r = x + n * F(-0.693359375)
    r = r + n * F(2.12194440e-4)
    p = np.full_like(x, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F(c)
    p = p * (r * r) + r + F(1)
    power = ((biased.view(np.int32) - 0x4B400000 + 127) << 23).astype(np.int32).view(F)
    return np.where(z < F(-87), F(0), p * power).astype(F)


def weights(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, int]:
    """What is drawn from, for one row of adjusted float32 logits: id → its share of the mass, ids ascending."""
    x, count = logits.astype(F), len(logits)
    if temperature == 0:
        return {int(x.argmax()): 1}
    with np.errstate(over="ignore"):
        z = ((x - x.max()) / F(temperature)).astype(F)
    e = decay(z)
    shares = [int(w) for w in (e.astype(np.float64) * 2.0**44).astype(np.int64)]
    order = sorted(range(count), key=lambda i: (-z[i], i))
    if 0 < top_k < count:
        order = order[:top_k]
    if F(top_p) < 1:
        mass = sum(shares[i] for i in order)
        share = int(F(top_p) * F(2**63))
        target, running, kept = max(1, -(-share * mass >> 63)), 0, []
        for i in order:
            if running >= target:
                break
            running += shares[i]
            kept.append(i)
        order = kept
    return {i: shares[i] for i in sorted(i for i in order if e[i] >= F(min_p))}


def draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int, index: int
) -> int:
    """The token id for one row of adjusted float32 logits."""
    x = logits.astype(F)
    if not (x < F(np.inf)).all() or x.max() == -np.inf:
        return -1
    kept = weights(x, temperature, top_k, top_p, min_p)
    left = philox(seed & (2**64 - 1), position, index) * sum(kept.values()) >> 64
    for i, weight in kept.items():
        if weight > left:
            return i
        left -= weight
    raise AssertionError("the mass exceeds every target")


def parameters(rows: int, options: tuple[float, int, float, float]) -> list[torch.Tensor]:
    """Arguments of ``sample`` after the logits: (temperature, top_k, top_p, min_p) in every row, random counters."""
    temperature, top_k, top_p, min_p = options
    return [
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
        torch.randint(0, 2**40, (rows,)),
        torch.randint(0, 128, (rows,)).int(),
    ]
