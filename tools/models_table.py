#!/usr/bin/env python
"""Makes ``docs/models.md`` of what the parity tests measure: ``tools/models_table.py [pytest arguments]``.

Runs ``tests/models`` (or what the arguments say) with the recorder writing, replaces the rows of the tests that ran in
``tests/models/measured.json``, and renders the document. With ``--render`` alone it only renders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.recorder import KEY, ROWS, WRITE_TO  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
HEADER = """# Models that are served, and how far each was from its reference

Made by `tools/models_table.py` of what the parity tests of `tests/models` measure; do not edit by hand.

Path: *packed* batches hold the rows of all sequences without padding and go through the attention kernels of this
project; *padded* ones go through the model's own attention, texts of about one length together. The difference is
the largest over every row, vector or score that the test compared, in the measure that the reference names; the
weights are small random ones unless the reference says otherwise. In bfloat16 the router of a mixture of experts may
choose another expert than in float32, in transformers too: single rows differ much there, and means little.

Any other architecture is tried at load in the same way: served when its output agrees with transformers' own, refused
by name when not.

| architecture | path | head | checked against | float32 | bfloat16 |
| --- | --- | --- | --- | --- | --- |
"""


def render(rows: list[dict[str, Any]]) -> str:
    """The document: one line for each architecture, path, head and reference."""
    lines: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        found = lines[tuple(row[name] for name in KEY[:4])]
        found[row["dtype"]] = max(row["difference"], found.get(row["dtype"], 0.0))
    text = HEADER
    for key in sorted(lines, key=lambda key: (key[0].lower(), *key[1:])):
        numbers = [f"{lines[key][name]:.1g}" if name in lines[key] else "–" for name in ("float32", "bfloat16")]
        text += f"| {' | '.join([*key, *numbers])} |\n"
    return text


def measure(arguments: list[str]) -> list[dict[str, Any]]:
    """Run the tests and return their rows; exits when a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        file.touch()
        environment = os.environ | {WRITE_TO: str(file)}
        command = [sys.executable, "-m", "pytest", "-q", *(arguments or ["tests/models"])]
        if subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode:
            sys.exit("a test failed; the table was left as it is")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def merge(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of tests that ran replace those that they made before."""
    ran = {row["test"] for row in new}
    kept = {tuple(row[name] for name in KEY): row for row in old if row["test"] not in ran}
    for row in new:
        key = tuple(row[name] for name in KEY)
        if key not in kept or row["difference"] > kept[key]["difference"]:
            kept[key] = row
    return [kept[key] for key in sorted(kept)]


def main() -> None:
    measured = [] if sys.argv[1:] == ["--render"] else measure(sys.argv[1:])
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else []
    if measured:
        rows = merge(rows, measured)
        ROWS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    DOCUMENT.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
