"""The open loop's figures as lines, a table and plots of latency and goodput against load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arrivals import PERCENTS

Point = dict[str, Any]
HEAD = (
    f"{'task':10}{'offered/s':>10}{'goodput/s':>10}{'in time':>9}{'done/s':>8}{'whole p50, p95, p99 ms':>28}"
    f"{'first p50, p95, p99 ms':>28}{'between p50, p95, p99 ms':>26}{'CPU ms each':>12}{'MB':>7}{'of limit':>9}"
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
        f"{_three(found['whole']):>28}{_three(found.get('first')):>28}{_three(found.get('between')):>26}"
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
    """Latency above, what came of the load below: a column for a task, three for streams; the mix has its own rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alone = [panel for name, sweep in result["tasks"].items() for panel in _panels(name, sweep) if not _is_mix(sweep)]
    mixed = [panel for name, sweep in result["tasks"].items() for panel in _panels(name, sweep) if _is_mix(sweep)]
    bands = [band for band in (alone, mixed) if band]
    width = max(len(band) for band in bands)
    size = (3.4 * width, 6.2 * len(bands))
    figure, axes = pyplot.subplots(2 * len(bands), width, figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for row, band in enumerate(bands):
        for column, (name, task, kind) in enumerate(band):
            above, below = axes[2 * row][column], axes[2 * row + 1][column]
            _latency(above, result["tasks"][name], task, kind)
            _below(below, result["tasks"][name], task, kind)
            words = {"whole": "end to end", "first": "first token", "between": "between messages"}[kind]
            above.set_title(f"{name if name == task else f'{name}: {task}'}, {words}", fontsize=9)
            for axis in (above, below):
                _finish(axis, result["tasks"][name])
    figure.suptitle(f"Open loop, {result['dtype']}: Poisson arrivals, timed from when they were due", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _is_mix(sweep: dict[str, Any]) -> bool:
    return len(sweep["points"][0]["tasks"]) > 1


def _panels(name: str, sweep: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(sweep, task, kind of latency) of each column."""
    tasks = list(sweep["points"][0]["tasks"])
    streams = {task for task in tasks for point in sweep["points"] if "first" in point["tasks"][task]}
    if _is_mix(sweep):
        return [(name, task, "first" if task in streams else "whole") for task in tasks]
    return [(name, name, kind) for kind in (["first", "between", "whole"] if name in streams else ["whole"])]


def _latency(axis: Any, sweep: dict[str, Any], task: str, kind: str) -> None:
    from matplotlib.ticker import LogLocator

    shown = [point for point in sweep["points"] if point["tasks"][task].get(kind)]
    for percent in PERCENTS:
        values = [point["tasks"][task][kind][f"p{percent}_ms"] for point in shown]
        axis.plot([point["rate"] for point in shown], values, marker="o", markersize=3, label=f"p{percent}")
    late = [point for point in shown if point["lag"]["late"]]
    if late:
        values = [point["tasks"][task][kind]["p99_ms"] for point in late]
        axis.plot([point["rate"] for point in late], values, "rx", label="client late")
    if shown:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    axis.set_ylabel("ms")


def _below(axis: Any, sweep: dict[str, Any], task: str, kind: str) -> None:
    """Goodput, once for each task; in the other columns of streams tokens a second and what one costs."""
    points = sweep["points"]
    rates = [point["rate"] for point in points]
    if kind == "between":
        axis.plot(rates, [point["tasks"][task]["done_per_s"] for point in points], "o-", markersize=3)
        axis.set_ylabel("tokens/s")
    elif kind == "whole" and "first" in points[0]["tasks"][task]:
        axis.plot(rates, [point["cpu_ms_each"] for point in points], "o-", markersize=3)
        axis.set_ylabel("CPU of the server, ms a token")
    else:
        for key, style in (("offered", "k--"), ("achieved", "o-"), ("goodput", "s-")):
            axis.plot(rates, [point["tasks"][task][key] for point in points], style, markersize=3, label=key)
        axis.set_ylabel("requests/s")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests/s of all tasks" if _is_mix(sweep) else "requests/s offered")


def _finish(axis: Any, sweep: dict[str, Any]) -> None:
    if sweep["sustained"]:
        axis.axvline(sweep["sustained"], color="tab:green", linewidth=1, label="sustained")
    if sweep["too_much"]:
        axis.axvline(sweep["too_much"], color="tab:red", linewidth=1, linestyle="--", label="too much")
    axis.set_visible(True)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)
