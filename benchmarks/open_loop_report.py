"""The open loop's figures as lines, a table and plots of latency and goodput against load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arrivals import PERCENTS

Point = dict[str, Any]
HEAD = (
    f"{'task':10}{'offered/s':>10}{'goodput/s':>10}{'in time':>9}{'done/s':>8}{'whole p50, p95, p99 ms':>24}"
    f"{'first p50, p95, p99 ms':>24}{'between p50, p95, p99 ms':>26}{'CPU ms each':>12}{'MB':>7}{'of limit':>9}"
    f"{'server':>7}{'client':>7}  notes"
)


def line(point: Point) -> str:
    """A point in short, to tell that the run goes on."""
    tasks = ", ".join(
        f"{name} {found['offered']:.1f}/s {found['in_time']:.0%} in time, {_three(found['whole'])} ms"
        for name, found in point["tasks"].items()
    )
    return f"{tasks}{_notes(point)}"


def table(result: dict[str, Any]) -> str:
    lines = [""]
    for name, sweep in result["tasks"].items():
        lines += [f"{name}: {_saturation(sweep)}", HEAD]
        for point in sweep["points"]:
            for number, (task, found) in enumerate(point["tasks"].items()):
                lines.append(_row(task, found, point if number == 0 else None))
        lines.append("")
    speeds = ", ".join(f"{kind} {value:.0f}" for kind, value in result["limits"]["gflop_per_s"].items())
    lines.append(f"limits: {result['limits']['read_gb_per_s']:.1f} GB/s read, GFLOP/s {speeds}")
    return "\n".join(lines)


def _saturation(sweep: dict[str, Any]) -> str:
    held, broke = sweep["sustained"], sweep["too_much"]
    parts = [f"sustains {held:.1f} requests/s" if held else "no rate sustained"]
    return parts[0] + (f", not {broke:.1f}" if broke else ", more was not tried")


def _row(task: str, found: dict[str, Any], point: Point | None) -> str:
    """``point``: for the first row of several that share what the server spent."""
    cells = (
        f"{task:10}{found['offered']:>10.1f}{found['goodput']:>10.1f}{found['in_time']:>9.0%}{found['done_per_s']:>8.0f}"
        f"{_three(found['whole']):>24}{_three(found.get('first')):>24}{_three(found.get('between')):>26}"
    )
    refused = " ".join(f"{code} {number}" for code, number in found["refused"].items())
    if point is None:
        return f"{cells}{'':42}  {refused}".rstrip()
    spent = (
        f"{point['cpu_ms_each']:>12.2f}{point['peak_rss_mb']:>7.0f}{point['of_limit']:>9.0%}"
        f"{point['server_cores']:>7.2f}{point['client_cores']:>7.2f}"
    )
    return f"{cells}{spent}  {refused}{_notes(point)}".rstrip()


def _three(values: dict[str, float] | None) -> str:
    return ", ".join(f"{values[f'p{percent}_ms']:.1f}" for percent in PERCENTS) if values else ""


def _notes(point: Point) -> str:
    return f"  CLIENT LATE by {point['lag']['p95_ms']:.0f} ms (p95)" if point["lag"]["late"] else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """A column for each task, of the generate task two: latency above, what came of the load below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(name, task, kind) for name, sweep in result["tasks"].items() for task, kind in _kinds(name, sweep)]
    panels, axes = pyplot.subplots(2, len(columns), figsize=(3.4 * len(columns), 6.6), squeeze=False)
    for number, (name, task, kind) in enumerate(columns):
        sweep = result["tasks"][name]
        _latency(axes[0][number], sweep, task, kind)
        _goodput(axes[1][number], sweep, task)
        words = {"whole": "end to end", "first": "first token", "between": "between messages"}[kind]
        axes[0][number].set_title(f"{name if name == task else f'{name}: {task}'}, {words}", fontsize=9)
    panels.suptitle(f"Open loop, {result['dtype']}: Poisson arrivals, timed from when they were due", fontsize=10)
    panels.tight_layout()
    panels.savefig(path, dpi=110)
    pyplot.close(panels)


def _kinds(name: str, sweep: dict[str, Any]) -> list[tuple[str, str]]:
    """(task, kind of latency) of each column of a sweep."""
    tasks = list(sweep["points"][0]["tasks"])
    streams = {task for task in tasks for point in sweep["points"] if "first" in point["tasks"][task]}
    if len(tasks) > 1:
        return [(task, "first" if task in streams else "whole") for task in tasks]
    return [(name, kind) for kind in (["first", "between", "whole"] if name in streams else ["whole"])]


def _latency(axis: Any, sweep: dict[str, Any], task: str, kind: str) -> None:
    shown = [point for point in sweep["points"] if point["tasks"][task].get(kind)]
    rates = [point["rate"] for point in shown]
    for percent in PERCENTS:
        values = [point["tasks"][task][kind][f"p{percent}_ms"] for point in shown]
        axis.plot(rates, values, marker="o", markersize=3, label=f"p{percent}")
    for point in shown:
        if point["lag"]["late"]:
            axis.axvline(point["rate"], color="tab:red", linewidth=0.6, linestyle=":")
    _mark(axis, sweep)
    if shown:
        axis.set_xscale("log")
        axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)


def _goodput(axis: Any, sweep: dict[str, Any], task: str) -> None:
    rates = [point["rate"] for point in sweep["points"]]
    for key, style in (("offered", "k--"), ("achieved", "o-"), ("goodput", "s-")):
        axis.plot(rates, [point["tasks"][task][key] for point in sweep["points"]], style, markersize=3, label=key)
    _mark(axis, sweep)
    axis.set_xlabel("requests/s offered" if len(sweep["points"][0]["tasks"]) == 1 else "requests/s of all tasks")
    axis.set_ylabel("requests/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _mark(axis: Any, sweep: dict[str, Any]) -> None:
    if sweep["sustained"]:
        axis.axvline(sweep["sustained"], color="tab:green", linewidth=1, label="sustained")
    if sweep["too_much"]:
        axis.axvline(sweep["too_much"], color="tab:red", linewidth=1, linestyle="--", label="too much")
