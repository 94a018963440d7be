# SPDX-License-Identifier: Apache-2.0
"""Documentation: generated parts are current, links work, named things exist, and pages are short."""

import json
import re

import make_docs
import pytest
from helpers import ROOT

from grpo.common import Problems
from grpo.data.files import read_rows
from grpo.data.heldout import date_of
from grpo.settings.environment import load_settings
from grpo.settings.help import setting_rows
from scripts.dev.record import recorded_values

README = ROOT / "README.md"
TRANSLATIONS = {README: ROOT / "docs" / "README.ja.md"}  # Pages and their Japanese.
TRANSLATIONS[ROOT / "docs" / "coming_from.md"] = ROOT / "docs" / "coming_from.ja.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
USER_PAGES = [README, *sorted(set((ROOT / "docs").glob("*.md")) - set(TRANSLATIONS.values()))]
CURRENT = [page for page in PAGES if page.name not in ("tried.md", "CHANGELOG.md")]  # These may name what was removed.
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
# Variables of other programs that the pages mention, constants, and names of the original script.
NOT_SETTINGS = {
    "CARDS", "CONDA_PREFIX", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CURVES",
    "DRY_RUN", "EPOCHS", "FLASH_ATTN_CUDA_ARCHS", "FROM", "GLOO_SOCKET_IFNAME", "GRADIENT_ACCUMULATION_STEPS",
    "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "KERNELS", "LD_LIBRARY_PATH",
    "MATRIX_GAIN", "MAX_JOBS",
    "NCCL_SOCKET_IFNAME", "NVTE_FUSED_ATTN", "OMP_NUM_THREADS", "RESUME_FILES", "ROCR_VISIBLE_DEVICES",
    "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_DISABLE", "TORCHINDUCTOR_FUSE", "TORCH_COMPILE_DISABLE", "TRACKERS",
    "TRAIN_BATCH_SIZE", "VENV", "VLLM_USE_FLASHINFER_SAMPLER", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT",
    "WANDB_PROJECT_NAME", "WANDB_RUN_NAME",
}  # fmt: skip


@pytest.mark.parametrize("name", [*make_docs.GENERATED, make_docs.PICTURE])
def test_generated_parts_are_current(name):
    assert (ROOT / name).read_text(encoding="utf-8") == make_docs.regenerated(name), "run scripts/dev/make_docs.py"


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


@pytest.mark.parametrize("page", CURRENT, ids=lambda p: p.name)
def test_named_files_are_there(page):
    text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
    # `COMMIT:path` is a file of another commit.
    named = set(re.findall(r"(?<![\w/.:-])((?:grpo|scripts|tests|data|docs|\.ci)/[\w/.-]*\w)", text))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", CURRENT, ids=lambda p: p.name)
def test_named_settings_are_settings(page):
    """A setting that was renamed or removed must not be offered any more, nor a value that is none of its choices."""
    names = {name for _, name, *_ in setting_rows()}
    text = page.read_text(encoding="utf-8")
    word = r"(?<![\w-])([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]|(?<=`)[A-Z]{4,}(?=[`=]))(?:=([^\s`'\")]+))?(?!\w)"
    for name, value in re.findall(word, text):
        assert name in names | NOT_SETTINGS, name
        if name in names and value and "..." not in value:
            assert not load_settings({name: value.rstrip(",;")})[2], (name, value)


FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*CURRENT, ROOT / "scripts/dev/reliability.toml"], ids=lambda p: p.name)
def test_options_in_commands_exist(page):
    code = page.read_text(encoding="utf-8").replace("\n    ", " ")  # The .toml indents a command's further lines.
    if page.suffix == ".md":
        code = "".join(FENCE.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
    for script, arguments in re.findall(r"((?:scripts/[\w/]+|train_grpo)\.(?:py|sh))((?: [^#\n]*)?)", code):
        text = (ROOT / script).read_text(encoding="utf-8")
        options = re.findall(r"(?<=\s)--[a-z][\w-]*", arguments) if script != "scripts/torchrun.sh" else []
        assert not [option for option in options if option not in text], (script, arguments)


def count_words(page):
    """The words of a page; the bars of its tables are none."""
    return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))


def test_pages_are_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 100
    assert sum(map(count_words, USER_PAGES)) <= 15_000
    maintainers = sorted((ROOT / "docs" / "maintainers").glob("*.md"))
    assert maintainers and not [page.name for page in maintainers if count_words(page) > 1_800]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_are_narrow(page):
    """Like code, text is read beside a diff; the rows of tables cannot be wrapped."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def outline(text):
    """The levels of the headings and the lines of code in their order, without comments, which are translated."""
    lines = []
    for number, part in enumerate(FENCE.split(text)):
        if number % 2:  # The odd parts are the code between fences.
            lines += [re.sub(r"\s+#.*", "", line) for line in part.splitlines()]
        else:
            lines += re.findall(r"^#+(?= )", part, re.MULTILINE)
    return lines


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda p: p.name)
def test_a_translation_has_the_same_headings_and_commands(page):
    english = outline(page.read_text(encoding="utf-8"))
    assert len(english) > 10 and "python train_grpo.py --check" in english
    assert english == outline(TRANSLATIONS[page].read_text(encoding="utf-8"))


def test_a_translated_table_has_the_same_first_cells():
    """What was typed is on the left of docs/coming_from.md and is not translated, but for words without code."""
    page = ROOT / "docs" / "coming_from.md"
    rows = [
        [re.findall(r"`[^`]+`", line.split(" | ")[0]) for line in text.splitlines() if line.startswith("|")]
        for text in (page.read_text(encoding="utf-8"), TRANSLATIONS[page].read_text(encoding="utf-8"))
    ]
    assert rows[0] == rows[1] and len(rows[0]) > 40


def test_the_picture_of_a_step_shows_recorded_figures():
    picture = (ROOT / "docs" / "step.svg").read_text(encoding="utf-8")
    variants = ("experts-bf16", "experts-shared", "steps-per-generation", "experts-shared-22")
    runs = [recorded_values(f"{variant}-h200.json") for variant in variants]
    shown = re.findall(r">([\d.]+)</text>", picture)[2:]  # The first two are those of TRL's path.
    assert shown == [f"{values[name]:.1f}" for values in runs for name in ("step_s", "job_peak_gib")]


def test_every_result_is_named_by_a_page_or_a_test():
    """A measurement that no sentence needs is in the history, at its commit."""
    texts = [path.read_text(encoding="utf-8") for path in [*PAGES, *(ROOT / "tests").rglob("*.py")]]
    named = set(re.findall(r"[\w-]+(?=\.json|\")", "\n".join(texts)))
    assert not {path.stem for path in RESULTS} - named


def test_the_readmes_csv_is_accepted(tmp_path):
    """A header and three rows that the loader takes, and that teach something: no row pays all actions the same."""
    (block,) = re.findall(r"^```csv\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    path = tmp_path / "example.csv"
    path.write_text(block, encoding="utf-8")
    problems = Problems()
    rows = read_rows("DATA", str(path), problems)
    assert not problems and len(block.splitlines()) == 4 and len(rows) == 3
    assert all(len(row.rewards) == 3 and len(set(row.rewards)) > 1 for row in rows)


def test_results_say_where_they_come_from():
    for record in (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS):
        assert set(record) - {"files", "source"} == {"command", "machine", "date", "versions", "commit", "figures"}
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", record["commit"])
        for figure in record["figures"]:
            assert set(figure) == {"name", "value", "unit", "note"} and isinstance(figure["value"], (int, float))


def test_the_table_of_data_md_becomes_rows(tmp_path, monkeypatch):
    """The lines of pandas as they are printed, but for the workbook, whose reader is no package of ours."""
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    code = re.search(r"```python\nimport pandas\n(.*?)```", text, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mydata").mkdir()
    (tmp_path / "tickets.csv").write_text(
        "severity;queue;opened;cost_wait;cost_team;cost_manager\n4;2;01.09.2026;3,5;1;2\n"
        "5;;01.09.2026;4;4;4\n9;7;02.09.2026;9;2,25;1\n"
    )
    swapped = re.search(r'pandas\.read_excel\("tickets\.xlsx"\)  # or (.*)', code)
    exec(f"import pandas\n{code.replace(swapped[0], 'pandas.' + swapped[1])}", {})
    problems = Problems()
    rows = read_rows("DATA", "mydata/tickets.csv", problems)
    assert not problems and [row.rewards for row in rows] == [(-3.5, -1.0, -2.0), (-9.0, -2.25, -1.0)]
    assert [date_of(row) for row in rows] == ["2026-09-01", "2026-09-02"]
    assert rows[0].messages[0][1].startswith("Ticket: severity 4, 2 in the queue. Answer [0] wait")
