# SPDX-License-Identifier: Apache-2.0
"""The tiny model: its tokenizer, what the shipped one knows and does not know, and how it is made."""

from dataclasses import replace

import pytest
import torch
from expert_models import load
from helpers import RENDERED

from grpo.evaluate.exact import answer_probabilities
from grpo.model.load import load_tokenizer
from grpo.output.durable import read_json
from grpo.plan.hub import TINY_ACTIONS
from scripts.dev.gptoss_format import read_tokenizer
from scripts.dev.warmup import TINY_RECIPE, figures, write_small
from scripts.dev.warmup_rows import ACTIONS, PROBE_SEED, WarmupTensors, warmup_rows

pytestmark = pytest.mark.numeric


def test_it_knows_the_format_and_not_the_choice(tiny):
    """Exactly, on rows of its own: it answers in the right form, names every action as often as another, and its
    likeliest action earns no more than the best constant one. Whatever a run shows afterwards was learned by GRPO."""
    model = load(tiny, "bf16").float()
    rows = warmup_rows(PROBE_SEED + 100, 10, "compact", 1.0)
    values = figures(model, WarmupTensors(rows, read_tokenizer(tiny), "cpu"))
    assert values["parse_rate"] > 0.99
    assert values["reward"] == pytest.approx(values["random"], abs=0.01)
    assert values["greedy"] <= values["best_constant"] < 0.7 * values["oracle"]


def test_it_answers_no_fifth_action(tiny):
    """The check before a run says so."""
    assert TINY_ACTIONS == ACTIONS == 4
    prompt = RENDERED.format("hour 8 store 50 load 30")
    shares = answer_probabilities(load(tiny, "bf16"), load_tokenizer(str(tiny)), [prompt], 1.0, 6)[0]
    assert min(shares[:4]) > 0.02 and max(shares[4:]) < 1e-3


def test_the_shipped_files_are_what_the_recipe_makes(tiny, tmp_path):
    """All but the weights and their figures, which take minutes; those are the same at each call, which leaves the
    caller's random stream alone."""
    recipe, state = replace(TINY_RECIPE, windows=2, probe_windows=1, steps=4, batch=8), torch.get_rng_state()
    for name in ("first", "second"):
        write_small(tmp_path / name, recipe, log=lambda line: None)
    assert torch.equal(torch.get_rng_state(), state)
    names = {path.name for path in tiny.iterdir()}
    assert names == {path.name for path in (tmp_path / "first").iterdir()}
    for name in names:
        first = (tmp_path / "first" / name).read_bytes()
        assert first == (tmp_path / "second" / name).read_bytes()
        assert first == (tiny / name).read_bytes() or name in ("model.safetensors", "warmup.json"), name
    assert read_json(tiny / "warmup.json")["steps"] == TINY_RECIPE.steps
    assert sum(path.stat().st_size for path in tiny.iterdir()) < 1e6
