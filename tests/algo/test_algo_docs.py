"""The pages about algorithms say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles.algo import ROWS

DOCS = Path(__file__).parents[2] / "docs"
REDUCTION, KL = 4, 6


@pytest.mark.parametrize("name", list(ROWS))
def test_the_table_shows_each_rows_defaults(name):
    row = ROWS[name]
    line = next(line for line in (DOCS / "algorithms.md").read_text().splitlines() if line.startswith(f"| `{name}` |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[REDUCTION] == f"`{row.defaults['reduction']}`"
    assert cells[5] == f"≥ {row.min_group_size}"
    assert cells[KL].startswith(f"{row.defaults['beta']:g}")
    assert ("in the reward" in cells[KL]) == (row.defaults["beta"] > 0)
    for key in ("clip_low", "clip_high", "ratio_cap", "mask_threshold", "nll_coef"):
        value = row.defaults.get(key)
        if value:
            assert re.sub(r"e-0", "e-", f"{value:g}").replace("0.0003", "3e-4").replace("0.0004", "4e-4") in cells[3]
    assert ("one update" in cells[3]) == row.one_update


@pytest.mark.parametrize("name", list(ROWS))
def test_every_paper_stands_in_the_index(name):
    index = (DOCS / "paper_index.md").read_text()
    assert f'`name = "{name}"`' in index
    for paper in re.findall(r"arXiv:\d{4}\.\d{5}", ROWS[name].source):
        assert paper in index


def test_every_paper_of_the_code_stands_in_the_index():
    index = (DOCS / "paper_index.md").read_text()
    package = Path(__file__).parents[2] / "miles" / "algo"
    cited = {p for path in package.glob("*.py") for p in re.findall(r"arXiv:\d{4}\.\d{5}", path.read_text())}
    assert cited
    assert {paper for paper in cited if paper not in index} == set()
