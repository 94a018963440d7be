# SPDX-License-Identifier: Apache-2.0
"""The report as Chromium lays it out, on a phone, a tablet and a desktop. Run: python -m pytest
tests/evaluate/test_report_page.py"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_folders import EVALUATION, GPU, metrics_row, plant_record, write_run

from grpo.evaluate import report_pictures
from grpo.evaluate.report import write_report
from grpo.output.logs import EVALUATED

WIDTHS = (390, 768, 1280)
LEAST_CONTRAST, LEAST_TEXT = 4.5, 10.0  # WCAG AA's ratio for text; pixels of the text in a picture.
# Measures each frame's page: whether it scrolls sideways, words that stand on two lines of a table, texts of too little
# contrast, how much pictures are scaled, and where the parts begin.
MEASURE = """
const rgba = text => text.match(/[\\d.]+/g).map(Number);
const luminance = color => {
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = color.slice(0, 3).map(v => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = element => {
  for (let e = element; e; e = e.parentElement) {
    const color = rgba(getComputedStyle(e).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  }
  return [255, 255, 255];
};
function measure(page, width) {
  const texts = [], walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) if (walker.currentNode.data.trim()) texts.push(walker.currentNode);
  const broken = [], faint = [];
  for (const node of texts) {
    const parent = node.parentElement;
    const [a, b] = [luminance(rgba(getComputedStyle(parent).color)), luminance(background(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < CONTRAST) faint.push([node.data.trim().slice(0, 40), ratio]);
    for (const word of parent.closest('td, th, dt') ? node.data.matchAll(/[^\\s\\/-]+/g) : []) {
      const range = page.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(word[0]);
    }
  }
  const top = name => page.querySelector(name).getBoundingClientRect().top;
  const scales = [...page.images].map(image => image.getBoundingClientRect().width / image.naturalWidth);
  return {width, inner: page.defaultView.innerWidth, scroll: page.documentElement.scrollWidth, broken, faint, scales,
    order: ['.verdict', 'table.figures', 'img', 'article', 'table.words'].map(top)};
}
addEventListener('load', () => {
  const results = [...document.querySelectorAll('iframe')].map(frame => measure(frame.contentDocument, frame.width));
  document.getElementById('results').textContent = JSON.stringify(results);
});
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser. CI must have it (scripts/test.sh installs Debian's package); elsewhere its tests are skipped."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None and os.environ.get("CI"):
        pytest.fail("CI needs Chromium: apt-get install chromium")
    return path or pytest.skip("no Chromium is installed (apt-get install chromium)")


def measured(chromium: str, page: Path, tmp_path: Path) -> list[dict]:
    """What MEASURE says of the page at each of WIDTHS. Frames have these widths exactly; windows have a least one."""
    source = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{source}"></iframe>' for width in WIDTHS)
    script = MEASURE.replace("CONTRAST", str(LEAST_CONTRAST))
    harness = tmp_path / "frames.html"
    harness.write_text(
        f'<meta charset="utf-8"><style>iframe {{ border: 0 }}</style><pre id="results"></pre>{frames}'
        f"<script>{script}</script>",
        encoding="utf-8",
    )
    command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", harness.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    results = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.DOTALL)
    assert results and results[1], done.stderr[-2000:]
    return json.loads(html.unescape(results[1]))


def plant_run(folder: Path) -> Path:
    """A run with everything there is: all curves, actions, a simulator with many columns, long file names."""
    metrics = [metrics_row(step, **GPU) for step in range(1, 31)]
    metrics[9] |= dict.fromkeys(EVALUATED, 2.0) | {"heldout_reward": 0.5}
    samples = [{"step": 1, "prompt_id": "days:1", "completion": "[1] " * 300, "parsed_action": 1, "reward": 0.5}]
    samples = [row | {"best_action": 1, "tokens": 7, "truncated": 0} for row in samples]
    record = {"settings": {"TOTAL_STEPS": 30, "DATA": f"/home/someone/{'a_long_name_' * 8}.csv"}}
    reason = f"torch's FlashAttention, see {'https://example.org/' + 'path_' * 30}"
    record |= {"sources": {"DATA": "environment"}, "choices": {"attention": ["torch_flash", reason]}}
    files = {"settings": record, "evaluation": EVALUATION, "closed_loop": plant_record("always_0", "charge_when_clean")}
    return write_run(folder, metrics, samples, **files)


def text_run(folder: Path) -> Path:
    """A run of questions and answers: rows without actions, and a panel that is always 0."""
    figures = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "parse_rate": 1.0, "clipped_ratio": 0.0}
    evaluation = {"samples": 8, "temperature": 1.0, "exact": False, "before": figures, "after": figures}
    metrics = [metrics_row(step, best_action_rate="", clipped_ratio=0) for step in (1, 2, 3)]
    samples = [{"step": 1, "prompt_id": "sums:1", "completion": "12", "parsed_action": "", "reward": 0.5}]
    samples = [row | {"best_action": "", "tokens": 7, "truncated": 0} for row in samples]
    return write_run(folder, metrics, samples, evaluation=evaluation)


@pytest.mark.parametrize("make", [plant_run, text_run])
def test_the_page_fits_every_screen(chromium, tmp_path, make):
    """No page scrolls sideways, no word of a table is broken, every text can be read, and the verdict comes first."""
    page = write_report(make(tmp_path / "run"))
    smallest = min(report_pictures.FONT_SIZE, report_pictures.LEGEND_SIZE) / 72 * report_pictures.DPI
    for result in measured(chromium, page, tmp_path):
        assert result["inner"] == int(result["width"]) >= result["scroll"], result
        assert not result["broken"] and not result["faint"], result
        assert result["scales"] and min(result["scales"]) * smallest >= LEAST_TEXT, result
        assert result["order"] == sorted(result["order"]), "verdict, before and after, curves, completions, settings"


def test_the_page_has_no_words_of_another_task(tmp_path):
    """Rows without actions have no regret, no best action and no plant; what is always 0 is a sentence."""
    text = write_report(text_run(tmp_path / "run")).read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "|", text)
    for word in ("Regret", "Best action", "action none", "Answers by action", "lant", "best unknown"):
        assert word not in text, word
    assert "No answer was cut off." in text and "Cut-off answers" not in text
