# SPDX-License-Identifier: Apache-2.0
"""Documentation: generated parts are current, links lead somewhere. Run: python -m pytest tests/test_docs.py"""

from __future__ import annotations

import json
import re

import make_docs
import pytest
from conftest import ROOT

from grpo.run.logs import COMPLETIONS, METRICS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("name", make_docs.GENERATED)
def test_generated_parts_are_current(name):
    assert (ROOT / name).read_text(encoding="utf-8") == make_docs.GENERATED[name](), "run scripts/make_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page.name}: {target}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_results_say_where_they_come_from(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == {"command", "machine", "date", "versions", "commit", "figures"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", record["date"]) and re.fullmatch(
        r"[0-9a-f]{40}(-dirty)?|unknown", record["commit"]
    )
    assert record["figures"] and all(set(one) == {"name", "value", "unit", "note"} for one in record["figures"])
    assert all(isinstance(one["value"], (int, float)) for one in record["figures"])


def test_every_column_has_a_glossary_line():
    glossary = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in [*METRICS, *COMPLETIONS]:
        assert re.search(rf"^\| `{name}` \| .* \| \S.+ \|$", glossary, re.MULTILINE), name
