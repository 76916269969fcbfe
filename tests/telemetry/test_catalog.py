"""The table of metrics, the dashboard and the catalogue say the same."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyruntime.telemetry.catalog import METRICS, Kind
from tests.tools import need

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/pyruntime.json").read_text())
DOCUMENT = (ROOT / "docs/metrics.md").read_text()
# Of the Prometheus client, for every process; and labels that the scraper adds.
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
SCRAPED = {"job", "instance"}
# What Grafana puts in for its variables.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$job": ".*"}


def exposed() -> dict[str, set[str]]:
    """Labels by every name that a query may use."""
    names = {name: set[str]() for name in PROCESS}
    for each in METRICS:
        if each.kind is Kind.HISTOGRAM:
            names |= {f"{each.name}_{part}": set(each.labels) for part in ("sum", "count")}
            names[f"{each.name}_bucket"] = {*each.labels, "le"}
        else:
            names[each.name] = set(each.labels)
    return names


def queries() -> Iterator[tuple[str, str]]:
    """Panel and expression."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["definition"]


def documented_queries() -> list[str]:
    blocks = re.findall(r"```promql\n(.*?)```", DOCUMENT, re.S)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


EVERY = [*queries(), *(("docs/metrics.md", query) for query in documented_queries())]


def test_the_table_lists_every_metric_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, –]+) \| (.+) \|$", DOCUMENT, re.M)
    wanted = [(each.name, each.kind.value, ", ".join(each.labels) or "–", each.help) for each in METRICS]
    assert rows == wanted


@pytest.mark.parametrize(("where", "query"), EVERY, ids=[where for where, _ in EVERY])
def test_queries_name_metrics_and_labels_that_there_are(where, query):
    names = exposed()
    used = re.findall(r"\b(?:pyruntime|process|python)_\w+", query)
    assert used
    assert not set(used) - names.keys()
    known = SCRAPED.union(*(names[name] for name in used))
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = [label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")]
    assert not {*matched, *grouped} - known


def test_deployment_files_name_metrics_that_there_are():
    made_there = {"pyruntime_queue_seconds_mean"}
    files = [*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "deploy").rglob("*.yml")]
    used = {name for file in files for name in re.findall(r"\bpyruntime_\w+", file.read_text())}
    assert not used - exposed().keys() - made_there


def test_legends_use_labels_that_their_queries_keep():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            kept = SCRAPED.union(*(group.split(", ") for group in re.findall(r"by \(([^)]*)\)", target["expr"])))
            assert not set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - kept, panel["title"]


def test_the_dashboard_shows_every_metric_that_is_about_work():
    seen = {name for _, query in queries() for name in re.findall(r"\bpyruntime_\w+", query)}
    missing = [each.name for each in METRICS if not any(name.startswith(each.name) for name in seen)]
    assert missing == [
        "pyruntime_failed_inferences_total",
        "pyruntime_waiting_tokens",
        "pyruntime_model_info",
        "pyruntime_threads",
    ]


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_promtool_can_read_every_query(tmp_path):
    promtool = need("promtool", "apt-get install prometheus")
    rules = []
    for place, (_, query) in enumerate(EVERY):
        if query.startswith("label_values("):  # Grafana's own
            continue
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        rules.append({"record": f"query:{place}", "expr": query})
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # YAML as well
    command = [promtool, "check", "rules", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout
