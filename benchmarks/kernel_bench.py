"""The compiled CPU ops against plain torch, eager and through torch.compile, in one run.

    python benchmarks/kernel_bench.py [--threads N] [--repeats N] [--no-compile] [--only TEXT] [--json FILE]

Prints a table and, last, one JSON line. Each figure is the fastest of several runs, the candidates taken in turn. The
read bandwidth is that of the fastest torch reduction over a matrix that no cache holds. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from kernel_cases import Case, Run, all_cases, head, label_cases

from pyruntime import ops


def fastest(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Milliseconds of each, its fastest of ``repeats``, one after the other in every round."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def read_bandwidth(repeats: int) -> float:
    """GB/s of reading 512 MiB."""
    block = torch.ones(128 << 20)
    whole = block.view(torch.int64)
    runs: dict[str, Run] = {"sum": block.sum, "max": block.amax, "min": block.amin, "words": whole.amax}
    return block.numel() * 4 / min(fastest(runs, repeats).values()) / 1e6


def measure(case: Case, repeats: int, with_compile: bool) -> dict[str, object]:
    """One line of the table: milliseconds, the ratio to the best plain expression and to what the target is set by."""
    runs: dict[str, Run] = {"ours": case.ours, **case.plain}
    if with_compile:
        for name in case.compilable:
            runs[f"compiled {name}"] = torch.compile(case.plain[name], dynamic=False)
    with torch.inference_mode():
        times = fastest(runs, repeats)
    best = min((name for name in times if name != "ours"), key=times.__getitem__)
    against = case.against or best
    line: dict[str, object] = {
        "case": case.name,
        "ours_ms": times["ours"],
        "best": best,
        "best_ms": times[best],
        "ratio": times[best] / times["ours"],
        "target": case.target,
        "against": against,
        "target_ratio": times[against] / times["ours"],
        "all_ms": times,
    }
    if case.bytes:
        line["gb_per_s"] = case.bytes / times["ours"] / 1e6
    return {**line, **case.notes}


def peak_of(which: str) -> int:
    """Bytes by which one call raises the process's peak above what it holds before."""
    case = label_cases(head())[2]
    run = case.ours if which == "ours" else case.plain[which]
    with torch.inference_mode():
        run()
        ctypes.CDLL(None).malloc_trim(0)  # or the run could use, unseen, what the one before left
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        run()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peaks(threads: int) -> dict[str, int]:
    """Peak memory of the whole-vocabulary form and of its plain twin, each in a process of its own."""
    found = {}
    for which in ("ours", "logsumexp"):
        command = [sys.executable, __file__, "--threads", str(threads), "--peak-of", which]
        found[which] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    return found


def print_table(lines: list[dict[str, object]], bandwidth: float, memory: dict[str, int] | None) -> None:
    print(f"{'case':88}{'ours ms':>10}{'torch ms':>10}{'ratio':>8}{'GB/s':>8}  {'best of torch':32}target")
    for line in lines:
        speed = f"{line['gb_per_s']:.1f}" if "gb_per_s" in line else ""
        target = f"{line['target']} ×, is {line['target_ratio']:.2f} × {line['against']}" if line["target"] else ""
        print(f"{line['case']:88}{line['ours_ms']:10.3f}{line['best_ms']:10.3f}{line['ratio']:8.2f}{speed:>8}"
              f"  {line['best']:32}{target}")  # fmt: skip
    print(f"measured read bandwidth {bandwidth:.1f} GB/s")
    for line in lines:
        if "bandwidth_target" in line:
            print(f"{line['case']}: {float(str(line['gb_per_s'])) / bandwidth:.0%} of it")
    if memory:
        print(f"peak memory of the whole-vocabulary form: {memory['ours'] / 2**20:.1f} MiB, "
              f"plain {memory['logsumexp'] / 2**20:.1f} MiB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of both sides")
    parser.add_argument("--repeats", type=int, default=20, help="rounds, of which the fastest counts")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--json", type=Path, help="also write the JSON line into this file")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak_of:
        print(peak_of(options.peak_of))
        return
    bandwidth = read_bandwidth(options.repeats)
    chosen = [case for case in all_cases() if options.only in case.name]
    lines = [measure(case, options.repeats, not options.no_compile) for case in chosen]
    memory = peaks(options.threads) if any("whole vocabulary" in case.name for case in chosen) else None
    print_table(lines, bandwidth, memory)
    result = {
        "build": ops.build_info(),
        "torch": torch.__version__,
        "threads": options.threads,
        "read_gb_per_s": bandwidth,
        "peak_bytes": memory,
        "cases": lines,
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
