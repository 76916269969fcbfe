"""What the machine can do at most, and how fast a model can be on it: so that figures are told as parts of a limit.

    python benchmarks/limits.py [--threads N] [--repeats N] [--json FILE]

Measured: GB/s of reading memory, and GFLOP/s of products of many rows in float32, bfloat16 and int8, the fastest of
torch and of this project's kernels over some shapes. Computed from a model's folder: the tokens and texts a second
that these leave possible (``Model``). Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
#: Rows, columns and depth of the products: the demo models' linears, and one that suits any processor.
SHAPES = ((512, 1536, 384), (512, 384, 1536), (4096, 1536, 384), (512, 2048, 640), (1024, 1024, 1024))


@dataclass(frozen=True)
class Limits:
    """``read_gb_per_s``; ``gflop_per_s`` of float32, bfloat16 and int8, a multiplication and an addition being two."""

    read_gb_per_s: float
    gflop_per_s: dict[str, float]
    threads: int


@dataclass(frozen=True)
class Model:
    """Sizes of a model that bound its speed.

    body: weights of the linear layers that every token goes through; head: of the output matrix, 0 in encoders;
    cache: elements of keys and values a token. The bounds count these alone: attention's products, norms, sampling,
    tokenising and gRPC come on top, so no server reaches them.
    """

    body: int
    head: int
    cache: int

    def prompt_s(self, tokens: float, limits: Limits, dtype: str) -> float:
        """Seconds at least for so many tokens of texts or prompts: two operations a weight of the body."""
        return tokens * 2 * self.body / (limits.gflop_per_s[dtype] * 1e9)

    def decode_s(self, streams: float, context: float, limits: Limits, dtype: str) -> float:
        """Seconds at least for a token of each stream, of ``context`` tokens on average: the roofline.

        All weights and the keys and values of all streams are read once, or every weight is multiplied with every
        stream's row, whichever takes longer. The cache holds two bytes an element, in float32 four.
        """
        weights = self.body + self.head
        cached = streams * context * self.cache * max(BYTES[dtype], 2)
        read_s = (weights * BYTES[dtype] + cached) / (limits.read_gb_per_s * 1e9)
        return max(read_s, streams * 2 * weights / (limits.gflop_per_s[dtype] * 1e9))


def model_of(folder: Path) -> Model:
    """The sizes of the model in a folder of config.json and safetensors, of which only the headers are read.

    Raises ``ValueError`` where no linear layers are found under names with ``layer.`` or ``layers.`` and a number.
    """
    config = json.loads((folder / "config.json").read_text())
    shapes = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _shapes(path)}
    body = sum(math.prod(s) for name, s in shapes.items() if len(s) == 2 and _is_of_layer(name))
    if not body:
        raise ValueError(f"{folder}: no weights of layers found")
    num_heads = config["num_attention_heads"]
    if not any("CausalLM" in name for name in config["architectures"]):
        return Model(body, 0, 0)
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    cache = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or num_heads) * head_dim
    return Model(body, config["vocab_size"] * config["hidden_size"], cache)


def _shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _is_of_layer(name: str) -> bool:
    parts = name.split(".")
    return any(a in ("layer", "layers") and b.isdigit() for a, b in pairwise(parts))


def measured(threads: int, repeats: int) -> Limits:
    import torch
    from kernel_bench import read_bandwidth

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        peaks = {dtype: _peak(dtype, repeats) for dtype in BYTES}
        return Limits(read_bandwidth(repeats), peaks, threads)


def _peak(dtype: str, repeats: int) -> float:
    """GFLOP/s of the fastest product; nothing is timed that did not run once before."""
    import torch
    from kernel_bench import Run, fastest
    from torch.nn import functional

    from pyruntime.ops import linear, quantized

    best = 0.0
    for rows, columns, depth in SHAPES:
        x, w = torch.randn(rows, depth), torch.randn(columns, depth)
        if dtype == "int8":
            narrow, packed = x.bfloat16(), quantized.pack_int8(w)

            def product(x: Any = narrow, w: Any = packed, columns: int = columns) -> object:
                return quantized.linear_int8(x, w, columns)

            runs: dict[str, Run] = {"ours": product}
        else:
            kind = getattr(torch, dtype)
            x, w = x.to(kind), w.to(kind)
            runs = {"torch": lambda x=x, w=w: functional.linear(x, w)}
            if linear.has_panels(kind):
                runs["ours"] = lambda x=x, w=w: linear.linear_panels(x, w)
        best = max(best, 2 * rows * columns * depth / min(fastest(runs, repeats).values()) / 1e6)
    return best


def table(limits: Limits, models: dict[str, Model], dtype: str, context: int = 128) -> str:
    speeds = ", ".join(f"{kind} {value:.0f}" for kind, value in limits.gflop_per_s.items())
    lines = [f"reads {limits.read_gb_per_s:.1f} GB/s; GFLOP/s: {speeds}; {limits.threads} threads"]
    for name, model in models.items():
        lines.append(f"{name}, {dtype}: {1 / model.prompt_s(1, limits, dtype):.0f} prompt tokens/s at most")
        if model.head:
            rates = (f"{n}: {n / model.decode_s(n, context, limits, dtype):.0f}" for n in (1, 4, 16, 64, 128))
            lines.append(f"{name}, {dtype}, tokens/s at most at streams of {context} tokens: " + ", ".join(rates))
    return "\n".join(lines)


def main() -> None:
    import torch

    from pyruntime.model.demo import demo_models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20, help="rounds, of which the fastest counts [20]")
    parser.add_argument("--json", type=Path, help="also write the limits into this file")
    options = parser.parse_args()
    limits = measured(options.threads, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(asdict(limits)) + "\n")
    models = {name: model_of(Path(folder)) for name, folder in demo_models(lambda line: None).items()}
    for dtype in BYTES:
        print(table(limits, models, dtype))


if __name__ == "__main__":
    main()
