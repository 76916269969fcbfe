"""The committed table is what the tests measure: no row too few (each test checks its own), none too many."""

import json
from pathlib import Path

from tests.models.conftest import COLLECTED
from tests.models.recorder import KEY, ROWS
from tools.models_table import DOCUMENT, merge, render

COMMITTED = json.loads(ROWS.read_text(encoding="utf-8"))


def test_the_document_is_made_of_the_measured_rows():
    assert DOCUMENT.read_text(encoding="utf-8") == render(COMMITTED)


def test_every_row_belongs_to_a_test_that_exists(request):
    """Of the files that this run collected whole."""
    files = {argument for argument in map(str, request.config.args) if "::" not in argument}
    whole = {Path(each).resolve() for each in files or {"tests"}}
    collected = request.config.stash[COLLECTED]
    for row in COMMITTED:
        file = Path(row["test"].split("::")[0]).resolve()
        if any(file == path or path in file.parents for path in whole):
            assert row["test"] in collected, f"{row['test']} is gone; run tools/models_table.py"


def test_rows_of_a_test_that_ran_again_are_replaced():
    def row(test, difference, head="MEAN"):
        return dict(zip(KEY, ("BertModel", "packed", head, "eager", "float32", test), strict=True)) | {
            "difference": difference
        }

    old = [row("a", 0.5), row("a", 0.1, head="CLS"), row("b", 0.2)]
    merged = merge(old, [row("a", 0.01), row("a", 0.02)])
    assert merged == [row("a", 0.02), row("b", 0.2)]
    assert "| BertModel | packed | MEAN | eager | 0.2 | – |" in render(merged)
