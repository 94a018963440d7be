# SPDX-License-Identifier: Apache-2.0
"""The Japanese README has the headings and the commands of README.md. Run: python -m pytest tests/test_translation.py"""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def outline(text: str) -> list[str]:
    """The levels of the headings and the lines of code in their order, without comments, which are translated."""
    lines = []
    for number, part in enumerate(FENCE.split(text)):
        if number % 2:  # the code of a fence
            lines += [re.sub(r"\s+#.*", "", line) for line in part.splitlines()]
        else:
            lines += re.findall(r"^#+(?= )", part, re.MULTILINE)
    return lines


def test_the_japanese_readme_has_the_same_headings_and_commands():
    pages = (ROOT / "README.md", ROOT / "docs" / "README.ja.md")
    english, japanese = (outline(page.read_text(encoding="utf-8")) for page in pages)
    assert english == japanese


PAGE = "# Title\n\n## Try\n\n```bash\nbash scripts/demo.sh   # plays\n```\n"
TRANSLATED = "# 題\n\n## 試す\n\n```bash\nbash scripts/demo.sh   # 遊ぶ\n```\n"


@pytest.mark.parametrize("old, new", [("demo.sh", "test.sh"), ("## Try", "### Try"), ("## Try\n", "")])
def test_another_heading_or_command_is_a_difference(old, new):
    assert outline(PAGE) == outline(TRANSLATED) != outline(PAGE.replace(old, new))
