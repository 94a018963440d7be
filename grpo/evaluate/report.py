# SPDX-License-Identifier: Apache-2.0
"""report.html: one page without network or scripts, made from the template page.html."""

from pathlib import Path

import jinja2
import matplotlib.style

from grpo.common import InputError, format_exception
from grpo.evaluate import report_text
from grpo.evaluate.heldout_table import heldout_table
from grpo.evaluate.report_pictures import STYLE, pictures
from grpo.evaluate.run_files import Run, read_examples, read_run
from grpo.figures.text import plain
from grpo.output.durable import write_text

# The template escapes every value by itself; nothing is marked as safe.
LOADER = jinja2.FileSystemLoader(Path(__file__).parent)
TEMPLATES = jinja2.Environment(loader=LOADER, autoescape=True, undefined=jinja2.StrictUndefined)
TEMPLATES.filters["plain"] = plain


def page_text(run: Run) -> str:
    """The page of a run."""
    # The page does not depend on styles that the caller or the user has set.
    with matplotlib.style.context(["default", "tableau-colorblind10", STYLE]):
        drawn, sentences = pictures(run)
    section = report_text.simulator_section(run)
    return TEMPLATES.get_template("page.html").render(
        name=run.folder.resolve().name,
        verdicts=report_text.without_repeats(
            [report_text.adapter_advice(run), report_text.heldout_verdict(run), section.verdict]
        ),
        facts=report_text.facts(run),
        pictures=drawn,
        sentences=sentences,
        heldout=heldout_table(run.evaluation),
        section=section,
        examples=read_examples(run.folder / "completions.csv", run.record),
        settings=(["Setting", "Value", "Set by"], report_text.settings_rows(run)),
        choices=(["Choice", "Value", "Reason"], report_text.choices_rows(run)),
    )


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html and return its path. Raises InputError if the folder holds no run, if one of its
    files is damaged, or if the page cannot be written."""
    page = folder / "report.html"
    try:
        # "replace" is for lone surrogates from a JSON file, which cannot be encoded.
        write_text(page, page_text(read_run(folder)).encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise InputError(f"the report cannot be written to {folder}: {error.strerror or error}") from error
    except InputError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        message = f"{folder}: a file is not as the run wrote it ({format_exception(error)})"
        raise InputError(f"{message}; was it edited by another program?") from error
    return page
