"""Figures of one run as tables and as a plot. A figure has ``engine``, ``dtype``, ``task``, ``unit`` and ``rounds``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from aims import US, Figure
from workload import streams_of


def name_of(task: str) -> str:
    """``generate, 16 streams``"""
    if not task.startswith("generate_"):
        return task
    streams = streams_of(task)
    return f"generate, {streams} stream{'s' if streams > 1 else ''}"


def tables(figures: list[Figure], verdicts: list[dict[str, Any]]) -> str:
    """Lines of text: every figure, then the aims that they decide."""
    lines = [
        "",
        f"{'work':22}{'engine':40}{'median':>9} {'least':>8} {'most':>8}  {'unit':15}{'CPU ms each':>12}{'MB':>7}",
    ]
    for figure in sorted(figures, key=lambda each: (list(_tasks(figures)).index(each["task"]), each["engine"] != US)):
        engine = f"{figure['engine']} {figure['dtype']}"
        rounds, cpu = figure["rounds"], statistics.median(figure["cpu_ms_each"])
        extra = "".join(
            f"   {key} {statistics.median(figure[key]):.4g}"
            for key in ("p99_ms", "first_token_p50_ms")
            if key in figure
        )
        lines.append(
            f"{name_of(figure['task']):22}{engine:40}{statistics.median(rounds):>9.4g} {min(rounds):>8.4g} "
            f"{max(rounds):>8.4g}  {figure['unit']:15}{cpu:>12.3f}{max(figure['peak_mb']):>7.0f}{extra}"
        )
    if verdicts:
        lines += ["", f"{'work':22}{'ours':24}{'against':32}{'ratio':>7}{'least':>7}{'most':>7}{'aim':>7}"]
    for each in verdicts:
        lines.append(
            f"{name_of(each['task']):22}{each['dtype']:24}{each['against']:32}{each['ratio']:>7.2f}"
            f"{min(each['rounds']):>7.2f}{max(each['rounds']):>7.2f}{each['aim']:>7.2f}  "
            f"{'met' if each['met'] else 'MISSED'}"
        )
    return "\n".join([*lines, ""])


def _tasks(figures: list[Figure]) -> dict[str, str]:
    """The tasks in the order in which they come, each with its unit."""
    return {figure["task"]: figure["unit"] for figure in figures}


def plot(figures: list[Figure], path: Path) -> None:
    """A panel each task, a bar each engine and precision: the median, and the least and most of all rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = _tasks(figures)
    names = list(dict.fromkeys((figure["engine"], figure["dtype"]) for figure in figures))
    engines = list(dict.fromkeys(engine for engine, _ in names))
    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    most = max(sum(figure["task"] == task for figure in figures) for task in tasks)
    size = (4.4 * columns, (0.9 + 0.27 * most) * rows)
    panels, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, (task, unit) in zip(axes.flat, tasks.items(), strict=False):
        shown = [figure for figure in figures if figure["task"] == task][::-1]
        medians = [statistics.median(figure["rounds"]) for figure in shown]
        spread = [
            [middle - min(figure["rounds"]) for middle, figure in zip(medians, shown, strict=True)],
            [max(figure["rounds"]) - middle for middle, figure in zip(medians, shown, strict=True)],
        ]
        bars = axis.barh(
            [f"{figure['engine']} {figure['dtype']}" for figure in shown],
            medians,
            xerr=spread,
            color=[f"C{engines.index(figure['engine'])}" for figure in shown],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        axis.bar_label(bars, fmt="%.3g", padding=4, fontsize=7)
        axis.margins(x=0.2)
        axis.set_title(f"{name_of(task)}: {unit}" + (" (less is better)" if unit == "p50_ms" else ""), fontsize=9)
        axis.tick_params(labelsize=7)
    panels.tight_layout()
    panels.savefig(path, dpi=110)
    pyplot.close(panels)
