"""What the project wants to reach against its peers, and how far from float32 an answer may be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

US = "pyruntime"
ENCODERS = ("vllm", "openvino", "onnxruntime", "sentence-transformers")

Figure = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """Ours in ``dtype`` against the best of ``peers`` in any of ``dtypes``: at least ``ratio`` times as fast."""

    task: str
    dtype: str
    peers: tuple[str, ...]
    dtypes: tuple[str, ...]
    ratio: float


UNQUANTISED = ("bfloat16", "float32")
AIMS = (
    Aim("embed", "bfloat16", ENCODERS, UNQUANTISED, 1.2),
    Aim("embed", "float32", ENCODERS, ("float32",), 1.03),
    Aim("embed", "int8", ENCODERS, UNQUANTISED, 1.6),
    Aim("rerank", "bfloat16", ENCODERS, UNQUANTISED, 1.15),
    Aim("score", "bfloat16", ("vllm",), UNQUANTISED, 1.7),
    Aim("generate_1", "bfloat16", ("llama.cpp",), UNQUANTISED, 1.1),
    Aim("generate_1", "bfloat16", ("vllm",), UNQUANTISED, 1.5),
    Aim("generate_1", "int8", ("llama.cpp",), ("int8",), 1.2),
    Aim("generate_4", "bfloat16", ("vllm",), UNQUANTISED, 1.3),
    Aim("generate_16", "bfloat16", ("vllm",), UNQUANTISED, 1.4),
    Aim("generate_64", "bfloat16", ("vllm",), UNQUANTISED, 1.2),
    # The round trip of gRPC included: at most 1.3 times the latency of the best engine in process.
    Aim("embed_one", "bfloat16", ENCODERS, UNQUANTISED, 1 / 1.3),
)

#: How far an answer may be from the reference (``reference.Reference.distance``), by precision: 1 - cosine of vectors
#: and of all logits of a rerank; log-probabilities of labels; those that a greedy choice may lack to the best.
_COSINE = {"float32": 1e-5, "bfloat16": 5e-4, "int8": 5e-3}
_LOG_PROBABILITY = {"float32": 0.001, "bfloat16": 0.25, "int8": 1.0}
#: Peers are not ours to judge; one that is farther away than this does other work.
_PEER_COSINE, _PEER_LOG_PROBABILITY = 2e-2, 2.0


def precision(dtype: str) -> str:
    """``bfloat16-no-drafts`` → ``bfloat16``."""
    return dtype.split("-")[0]


def allowed(engine: str, dtype: str, task: str) -> float:
    """The distance past which an engine's figures of ``task`` do not count."""
    in_logs = task == "score" or task.startswith("generate_")
    if engine != US:
        return _PEER_LOG_PROBABILITY if in_logs else _PEER_COSINE
    return (_LOG_PROBABILITY if in_logs else _COSINE)[precision(dtype)]


def times_faster(ours: float, theirs: float, unit: str) -> float:
    """How many times better than the peer: above 1 is faster."""
    return theirs / ours if unit == "p50_ms" else ours / theirs


def verdicts(figures: list[Figure]) -> list[dict[str, Any]]:
    """Each aim that these figures decide: the best peer, the ratio of the medians, and that of each round.

    A figure has ``engine``, ``dtype``, ``task``, ``unit`` and ``rounds``, one value each. Where ours guesses tokens
    ahead, the best peer is found among those that do and those that do not; where it does not (``-no-drafts``), among
    those that do not.
    """
    found = []
    for aim in AIMS:
        ours = [each for each in _of(figures, aim.task, (US,)) if precision(each["dtype"]) == aim.dtype]
        peers = [each for each in _of(figures, aim.task, aim.peers) if precision(each["dtype"]) in aim.dtypes]
        for each in ours:
            plain = each["dtype"].endswith("-no-drafts")
            fair = [peer for peer in peers if not (plain and peer["dtype"].endswith("-drafts"))]
            found += [_verdict(aim, each, fair)] if fair else []
    return found


def _of(figures: list[Figure], task: str, engines: tuple[str, ...]) -> list[Figure]:
    return [figure for figure in figures if figure["task"] == task and figure["engine"] in engines]


def _verdict(aim: Aim, ours: Figure, peers: list[Figure]) -> dict[str, Any]:
    unit = ours["unit"]
    choose = min if unit == "p50_ms" else max
    best = choose(peers, key=lambda peer: statistics.median(peer["rounds"]))
    rounds = [times_faster(a, b, unit) for a, b in zip(ours["rounds"], best["rounds"], strict=True)]
    ratio = times_faster(statistics.median(ours["rounds"]), statistics.median(best["rounds"]), unit)
    return {
        "task": aim.task,
        "dtype": ours["dtype"],
        "against": f"{best['engine']} {best['dtype']}",
        "ratio": ratio,
        "rounds": rounds,
        "aim": aim.ratio,
        "met": ratio >= aim.ratio,
    }
