"""Figures of one run as a table and as a plot, with pyruntime's ratio to each peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Figure = dict[str, Any]
US = "pyruntime"
#: What is compared, and whether less is better.
UNITS = {"texts_per_s": False, "items_per_s": False, "tokens_per_s": False, "p50_ms": True}


def name_of(figure: Figure) -> str:
    """What was measured: ``generate, 16 streams``; the same for every engine."""
    if "streams" not in figure:
        return str(figure["task"])
    return f"{figure['task']}, {figure['streams']} stream{'s' if figure['streams'] > 1 else ''}"


def unit_of(figure: Figure) -> str:
    return next(unit for unit in UNITS if unit in figure)


def compared(figures: list[Figure]) -> dict[tuple[str, str], dict[str, float]]:
    """(work, unit) → engine → its best figure. Embed counts our best request size, as a user would choose."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for figure in figures:
        unit = unit_of(figure)
        row = rows.setdefault((name_of(figure), unit), {})
        engine, value = figure["engine"], float(figure[unit])
        better = min if UNITS[unit] else max
        row[engine] = better(row[engine], value) if engine in row else value
    return rows


def ratio(ours: float, theirs: float, unit: str) -> float:
    """How many times better than the peer: above 1 is faster."""
    return theirs / ours if UNITS[unit] else ours / theirs


def table(figures: list[Figure]) -> str:
    """Lines of text: every figure of ours, then the comparison with each peer."""
    lines = ["", f"{'work':34}{'value':>10}  unit"]
    for figure in figures:
        if figure["engine"] != US:
            continue
        size = f", requests of {figure['request_size']}" if "request_size" in figure else ""
        unit = unit_of(figure)
        extra = "".join(
            f"   {key} {figure[key]:.4g}" for key in ("p99_ms", "first_token_p50_ms", "cached_tokens") if key in figure
        )
        lines.append(f"{name_of(figure) + size:34}{figure[unit]:>10.1f}  {unit}{extra}")
    peers = sorted({figure["engine"] for figure in figures} - {US})
    if peers:
        lines += ["", f"{'work':24}{'unit':>14}{US:>12}" + "".join(f"{peer:>24}{'ratio':>8}" for peer in peers)]
        for (work, unit), row in compared(figures).items():
            cells = "".join(_cell(row, peer, unit) for peer in peers)
            lines.append(f"{work:24}{unit:>14}{row.get(US, float('nan')):>12.1f}{cells}")
    return "\n".join([*lines, ""])


def _cell(row: dict[str, float], peer: str, unit: str) -> str:
    if peer not in row or US not in row:
        return f"{'-':>24}{'-':>8}"
    return f"{row[peer]:>24.1f}{ratio(row[US], row[peer], unit):>8.2f}"


def plot(figures: list[Figure], path: Path) -> None:
    """Bars of each work, one panel each, one bar an engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = compared(figures)
    engines = [US, *sorted({figure["engine"] for figure in figures} - {US})]
    panels, axes = pyplot.subplots(2, -(-len(rows) // 2), figsize=(3.2 * -(-len(rows) // 2), 6.4), squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for axis, ((work, unit), row) in zip(axes.flat, rows.items(), strict=False):
        shown = [engine for engine in engines if engine in row]
        bars = axis.bar(shown, [row[engine] for engine in shown], color=[f"C{engines.index(e)}" for e in shown])
        axis.bar_label(bars, fmt="%.3g")
        axis.margins(y=0.12)
        axis.set_title(f"{work}\n{unit}" + (" (less is better)" if UNITS[unit] else ""), fontsize=9)
        axis.tick_params(axis="x", labelrotation=20, labelsize=8)
    panels.tight_layout()
    panels.savefig(path, dpi=110)
    pyplot.close(panels)
