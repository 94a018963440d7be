# SPDX-License-Identifier: Apache-2.0
"""report.html: one page without network or scripts, made from the template page.html."""

from __future__ import annotations

from pathlib import Path

import jinja2
import matplotlib.style

from grpo.evaluate.figures import STYLE
from grpo.evaluate.report import facts, guarded, plant_verdict, reward_verdict, sections_of, tiles
from grpo.evaluate.run_data import ReportError, read_run
from grpo.run.durable import write_text
from grpo.run.logs import METRICS

# The template escapes every value by itself; nothing is marked as safe.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from what the run has written so far; returns the page.

    Uses matplotlib without pyplot and changes no setting of it. Raises ReportError where there is no run in the folder,
    or where it cannot be written to.
    """
    run = read_run(Path(folder))
    with matplotlib.style.context(["default", STYLE]):  # whatever style the caller or the user has set
        sections = [guarded(make, run) for make in sections_of(run)]
    text = TEMPLATES.get_template("page.html").render(
        name=run.folder.resolve().name,
        verdicts=[sentence for sentence in (reward_verdict(run), plant_verdict(run)) if sentence],
        tiles=tiles(run),
        facts=facts(run),
        sections=sections,
        glossary={name: meaning for name, meaning in METRICS.items() if name in run.columns},
    )
    page = run.folder / "report.html"
    try:
        # A lone surrogate in a JSON file cannot be written as UTF-8.
        write_text(page, text.encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise ReportError(f"the report cannot be written to {run.folder}: {error.strerror or error}") from error
    return page
