# SPDX-License-Identifier: Apache-2.0
"""report.html: one page without network or scripts."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.evaluate.figures import FIGURES, STYLE
from grpo.evaluate.report import SECTIONS, Section, facts, guarded, plant_verdict, reward_verdict, tiles
from grpo.evaluate.run_data import ReportError, Run, read_run
from grpo.run.folder import write_text
from grpo.run.logs import METRICS

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ name }}: training report</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1000px; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
.verdict { background: #f2f6fa; border-left: 4px solid #0072B2; padding: .75rem 1rem; margin: 1rem 0; }
.verdict p { margin: .25rem 0; }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 210px), 1fr)); }
.tile { border: 1px solid #ddd; border-radius: 8px; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.3; font-weight: 600; }
.tile span { display: block; line-height: 1.4; margin-top: .25rem; }
.small, .tile span, figcaption, .missing, caption { color: #555; font-size: .875rem; }
dl { display: grid; grid-template-columns: minmax(6.5rem, auto) 1fr; gap: .2rem .9rem; margin: 1rem 0; font-size: .9375rem; }
dt { color: #555; } dd { margin: 0; }
.figures { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; } figure img { display: block; width: 100%; height: auto; }
figcaption b { color: #222; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; caption-side: bottom; padding-top: .4rem; }
.scroll + .small { margin-top: -.5rem; }
th, td { padding: .35rem .4rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e5e5e5; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.glossary td { white-space: normal; text-align: left; vertical-align: top; }
.glossary th { text-align: left; }
article { border: 1px solid #ddd; border-radius: 8px; padding: .6rem .9rem; margin: .6rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; background: #f7f7f7; padding: .6rem; margin: .5rem 0 0;
  font: .8125rem/1.45 ui-monospace, Menlo, Consolas, monospace; max-height: 32rem; overflow-y: auto; }
summary { cursor: pointer; font-size: .9375rem; }
</style>
</head>
<body>
<h1>{{ name }}: training report</h1>
<div class="verdict">{% for sentence in verdicts %}<p>{{ sentence }}</p>{% endfor %}</div>
<div class="tiles">
{%- for tile in tiles %}
<div class="tile">{{ tile.label }}<b>{{ tile.value }}</b>{% for line in tile.lines %}<span>{{ line }}</span>{% endfor %}</div>
{%- endfor %}
</div>
<dl>{% for label, text in facts %}<dt>{{ label }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
{%- for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{%- for note in section.notes %}
<p>{{ note }}</p>
{%- endfor %}
{%- if section.pictures %}
<div class="figures">
{%- for picture in section.pictures %}
<figure id="{{ picture.file }}"><img alt="{{ picture.title }}: {{ picture.line }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption><b>{{ picture.title }}</b>{% if picture.detail %} ({{ picture.detail }}){% endif %}. {{ picture.line }}</figcaption></figure>
{%- endfor %}
</div>
{%- endif %}
{%- for table in section.tables %}
<div class="scroll"><table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div>
<p class="small">{{ table.text }}</p>
{%- endfor %}
{%- for kind, examples in section.examples.items() %}
<h3>{{ kind }}</h3>
{%- for example in examples %}
<article><div class="small">{{ example.facts }}</div>
{%- if example.folded %}
<details><summary>{{ example.text[:120] }} ...</summary>
<pre>
{{ example.text }}</pre></details>
{%- else %}
<pre>
{{ example.text }}</pre>
{%- endif %}
</article>
{%- endfor %}
{%- endfor %}
{%- for sentence in section.missing %}
<p class="missing">{{ sentence }}</p>
{%- endfor %}
</section>
{%- endfor %}
<section>
<h2>Glossary</h2>
<details><summary>The columns of metrics.csv</summary>
<table class="glossary"><tr><th>Column</th><th>Unit</th><th>Meaning</th></tr>
{%- for column, unit, text in glossary %}
<tr><td>{{ column }}</td><td>{{ unit }}</td><td>{{ text }}</td></tr>
{%- endfor %}
</table></details>
</section>
</body>
</html>
"""


@functools.cache
def page_template() -> Any:
    """The compiled page. It escapes every value by itself; nothing is marked as safe."""
    import jinja2

    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)


def render(run: Run, sections: Sequence[Section]) -> str:
    """The page of a run, whose sections were made before."""
    return page_template().render(
        name=run.folder.resolve().name,
        verdicts=[sentence for sentence in (reward_verdict(run), plant_verdict(run)) if sentence],
        tiles=tiles(run),
        facts=facts(run),
        sections=sections,
        glossary=[(name, unit, text) for name, (unit, text) in METRICS.items()],
    )


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html and `folder`/report/*.png from what the run has written so far; returns the page.

    Imports matplotlib and jinja2, but neither torch nor pyplot, and changes no setting of them. Raises ReportError
    where there is no run in the folder, where it cannot be written to, or where one of the two is not installed.
    """
    run = read_run(Path(folder))
    try:
        import jinja2  # noqa: F401
        import matplotlib.style
    except ImportError as error:
        raise ReportError(f"{error.name} is missing: the report needs what requirements.txt lists") from error
    with matplotlib.style.context(["default", STYLE]):  # whatever style the caller or the user has set
        sections = [guarded(make, run) for make in SECTIONS]
    page, images = run.folder / "report.html", run.folder / "report"
    try:
        images.mkdir(exist_ok=True)
        pictures = {picture.file: picture.png for section in sections for picture in section.pictures}
        for old in images.glob("*.png"):
            if old.name not in pictures and re.sub(r"_\d+$", "", old.stem) in FIGURES:  # of an earlier report
                old.unlink()
        for name, png in pictures.items():
            (images / name).write_bytes(png)
        # A lone surrogate in a JSON file cannot be written as UTF-8.
        write_text(page, render(run, sections).encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise ReportError(f"the report cannot be written to {run.folder}: {error.strerror or error}") from error
    return page
