"""What the parity tests measure, kept for ``docs/models.md``.

Every parity test says with ``record`` what it compared and how far apart the two were. Ordinarily that only
checks that the committed table has such a row; under ``tools/models_table.py [test files]`` the rows are written
down and the table is made of them.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

ROWS = Path(__file__).parent / "measured.json"
# Set by the tool: a file to which each row is appended as one line of JSON.
WRITE_TO = "PARITY_ROWS"
KEY = ("architecture", "path", "head", "reference", "dtype", "test")


def record(architecture: str, path: str, head: str, reference: str, difference: float, dtype: str = "float32") -> None:
    """One row of the table, once a test for each of its keys; the largest ``difference`` of equal keys counts.

    ``architecture``: the class that was loaded (``BertModel``). ``path``: ``packed`` or ``padded``.
    ``head``: what read the hidden rows (``hidden rows``, ``MEAN``, ``sequence classifier``, …).
    ``reference``: against what, and in which measure (``transformers eager, 1 - cosine``). ``dtype``: of the
    served model. Raises ``AssertionError`` when the committed table lacks the row.
    """
    row = dict(zip(KEY, (architecture, path, head, reference, dtype, _test()), strict=True))
    target = os.environ.get(WRITE_TO)
    if target:
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"difference": float(difference)}) + "\n")
        return
    assert tuple(row.values()) in _committed(), f"docs/models.md lacks {row}; run tools/models_table.py"


def _test() -> str:
    """The running test as pytest names it, without the phase."""
    return os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]


@functools.cache
def _committed() -> frozenset[tuple[str, ...]]:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    return frozenset(tuple(row[name] for name in KEY) for row in rows)
