# SPDX-License-Identifier: Apache-2.0
"""The Japanese README says what README.md says: commands, tables, links, names and figures are the same, section by section.

Run: python -m pytest tests/test_translation.py"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

ENGLISH, JAPANESE = ROOT / "README.md", ROOT / "docs" / "README.ja.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`[^`]*`")


def facts(text: str, folder: Path) -> dict[str, Counter]:
    """What a translation keeps of one section, by kind, counted. Links are resolved from `folder`; those between the two
    pages are left out."""
    found: dict[str, Counter] = {kind: Counter() for kind in ("code", "link", "table row", "name", "figure")}
    for language, block in FENCE.findall(text):  # comments are translated, a CSV has none
        found["code"].update(line if language == "csv" else re.sub(r"\s+#.*", "", line) for line in block.splitlines())
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        place = (folder / path).resolve()
        if "://" in target:
            found["link"][target] += 1
        elif path and place not in (ENGLISH, JAPANESE):
            found["link"][f"{place.relative_to(ROOT)}#{anchor}".removesuffix("#")] += 1
    text = re.sub(r"(?<=\])\([^)\s]+\)", "", text)
    rows = re.compile(r"^\|.*\|$", re.MULTILINE)
    for row in rows.findall(text):  # the names in each cell; words are translated
        cells = [" ".join(sorted(NAME.findall(cell))) or "..." for cell in row.strip("|").split("|")]
        found["table row"][" | ".join(cells)] += 1
    found["name"].update(NAME.findall(rows.sub("", text)))
    found["figure"].update(re.findall(r"(?<![A-Za-z\d.-])\d+(?:[.,-]\d+)*%?", NAME.sub("", text)))
    return found


def differences(english: str, japanese: str) -> list[str]:
    """Every fact of a section that only one of the two has, by the section's English heading."""
    sections = [re.split(r"^#+ ", text, flags=re.MULTILINE)[1:] for text in (english, japanese)]
    if len(sections[0]) != len(sections[1]):
        return [f"{len(sections[0])} headings in {ENGLISH.name}, {len(sections[1])} in {JAPANESE.name}"]
    wrong = []
    for one, other in zip(*sections, strict=True):
        ours, theirs = facts(one, ENGLISH.parent), facts(other, JAPANESE.parent)
        for kind in ours:
            lines = [("missing in", ours[kind] - theirs[kind]), ("only in", theirs[kind] - ours[kind])]
            where = f"{one.splitlines()[0]}: {kind}"
            wrong += [
                f"{where} {words} {JAPANESE.name}: {fact}" for words, facts_ in lines for fact in facts_.elements()
            ]
    return wrong


def test_the_japanese_readme_says_the_same():
    wrong = differences(*(page.read_text(encoding="utf-8") for page in (ENGLISH, JAPANESE)))
    assert not wrong, "\n".join(wrong)


PAGE = """# Title

Needs driver 580 ([more](docs/install.md#older-drivers)); regret falls to 3-11%; see `training.log`. 4 vLLM failed.

```bash
bash scripts/demo.sh     # plays
```

| Setting | Default | Meaning |
| --- | --- | --- |
| `LORA_R` | `4` | Rank. |
"""
TRANSLATED = """# 題

`training.log` を参照。ドライバ 580 が必要です([詳しく](install.md#older-drivers))。リグレットは 3-11% に下がる。4 vLLM の失敗。

```bash
bash scripts/demo.sh     # 遊ぶ
```

| 設定 | 既定値 | 意味 |
| --- | --- | --- |
| `LORA_R` | `4` | ランク。 |
"""
CHANGES = [
    ("figure", "580", "590"), ("figure", "3-11%", "3-12%"), ("figure", "4 vLLM", "5 vLLM"), ("link", "install.md", "data.md"),
    ("link", "#older-drivers", ""), ("name", "training.log", "run.log"), ("code", "demo.sh ", "play.sh "),
    ("table row", "`4`", "`8`"), ("table row", "LORA_R", "LORA_ALPHA"), ("headings", "# Title", "# Title\n# More"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "old", "new"), CHANGES)
def test_what_changes_in_the_english_one_is_named(kind, old, new):
    assert PAGE.count(old) == 1 and not differences(PAGE, TRANSLATED)
    wrong = differences(PAGE.replace(old, new), TRANSLATED)
    assert wrong and all(kind in line for line in wrong)
