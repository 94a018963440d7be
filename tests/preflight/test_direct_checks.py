# SPDX-License-Identifier: Apache-2.0
"""DIRECT_ANSWERS before a run: what is refused, all of it at once, and what is resolved."""

import functools

import pytest
from helpers import RENDERED, ROOT, write_csv
from machines import CPU, H100, only, resolved_run

from grpo.harmony import ANSWER_BEFORE
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.memory import PlanInputs, plan_memory
from grpo.preflight.banner import banner
from grpo.settings.table import Settings

HEADER = ["prompt", "reward_action_0", "reward_action_1"]
START = "<|start|>assistant"


@pytest.fixture
def direct_run(tmp_path):
    """Resolves a run with DIRECT_ANSWERS on the demo's data."""
    return functools.partial(resolved_run, tmp_path / "run", DIRECT_ANSWERS=1)


REFUSED = [
    ({"EXPECTED_REWARD": 0}, "EXPECTED_REWARD: DIRECT_ANSWERS samples nothing"),
    ({"REWARDS": "regret,format=0.1,gsm8k"}, "REWARDS: format, gsm8k may depend on more than row and action"),
    ({"STEPS_PER_GENERATION": 2}, "STEPS_PER_GENERATION: DIRECT_ANSWERS samples nothing that several steps"),
    ({"NUM_ITERATIONS": 2}, "NUM_ITERATIONS: DIRECT_ANSWERS samples nothing that several steps"),
    ({"PROMPTS_PER_STEP": 1}, "PROMPTS_PER_STEP: DIRECT_ANSWERS takes each prompt once"),
    ({"TOP_P": 0.9}, "DIRECT_ANSWERS: it learns from the rewards of all actions, and TOP_P"),
    ({"INVALID_REWARD": "nan"}, "DIRECT_ANSWERS: it learns from the rewards of all actions, and INVALID_REWARD=nan"),
]


def test_all_that_cannot_go_with_it_is_refused_together(direct_run):
    together = {name: value for settings, _ in REFUSED for name, value in settings.items()}
    problems = direct_run(H100, **together).problems
    for _, message in REFUSED:
        (problem,) = [text for text in problems if text.startswith(message)]
        assert "DIRECT_ANSWERS=0" in problem


def test_rows_need_the_reward_of_each_action(direct_run, tmp_path, monkeypatch):
    """Those of EVAL_DATA too, and also where the function would be content without."""
    code = "def score(completions, **columns):\n    return [0.5] * len(completions)\nscore.by_action = True\n"
    (tmp_path / "content.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    bare = write_csv(tmp_path / "bare.csv", ["prompt"], [[RENDERED.format(f"question {i}")] for i in range(3)])
    paid = write_csv(tmp_path / "paid.csv", HEADER, [[RENDERED.format(f"question {i}"), 0, 1] for i in range(3)])
    for data, heldout in ((bare, paid), (paid, bare)):
        problems = direct_run(DATA=data, EVAL_DATA=heldout, REWARDS="content:score").problems
        assert [text for text in problems if text.startswith("DIRECT_ANSWERS: ") and "bare.csv has no reward" in text]
    assert not direct_run(DATA=paid, EVAL_DATA=paid, REWARDS="content:score").problems


def test_an_action_of_several_tokens_is_refused(direct_run, tmp_path):
    """The tiny model's tokenizer has a token for each number up to 200."""
    header = ["prompt", *(f"reward_action_{k}" for k in range(202))]
    many = write_csv(tmp_path / "many.csv", header, [[RENDERED.format("question"), 1, *[0] * 201]])
    assert "its tokenizer writes `201` in several" in only(direct_run(DATA=many, EVAL_SAMPLES=0).problems)


def test_what_a_run_resolves_to(direct_run):
    """Also on a GPU with vLLM: groups of one, one token, no vLLM, and exact evaluation, with a line on each."""
    for machine in (CPU, H100):
        resolved = direct_run(machine, PROMPTS_PER_STEP=64, MAX_COMPLETION_LEN=4000, NUM_GENERATIONS=4, USE_VLLM=1)
        assert not resolved.problems
        s = resolved.settings
        assert (s.NUM_GENERATIONS, s.MAX_COMPLETION_LEN, s.USE_VLLM, s.completions_per_step) == (1, 1, False, 64)
        assert {resolved.sources[name] for name in ("NUM_GENERATIONS", "MAX_COMPLETION_LEN", "USE_VLLM")} == {"chosen"}
        assert not resolved.use_vllm and resolved.plan.engine is None and resolved.settings.EXPECTED_REWARD
        assert resolved.exact and "DIRECT_ANSWERS" in resolved.choices["exact"].reason and resolved.closed_loop.runs
        text = banner(resolved)
        assert "64 prompts, each once" in text and "rollouts         none: DIRECT_ANSWERS" in text
        assert "GENERATION_BATCH" not in text and "generations" not in text
        rendered = {row.prompt for row in [*resolved.rows, *resolved.eval_rows]}
        assert all(prompt.endswith(START + ANSWER_BEFORE) for prompt in rendered)
        assert all(prompt.endswith(START + ANSWER_BEFORE) for prompt in resolved.closed_loop.opening_prompts())
    unused = direct_run(GENERATION_BATCH=5, IS_CORRECTION="sequence_mask", PROMPTS_PER_STEP=64)
    assert not unused.problems and unused.settings.EXPECTED_REWARD


def test_full_prompts_of_a_large_model_are_evaluated_exactly_as_well(direct_run):
    """Sampled evaluations say that these are too many; here a forward pass tells the probabilities of all answers."""
    prompts = {"DATA": "data/tes_train.csv", "EVAL_DATA": "data/tes_heldout.csv", "MAX_PROMPT_LEN": 100_000}
    resolved = direct_run(EVAL_PROFILE=ROOT / "data/profile_heldout.csv", **prompts)
    assert resolved.exact and resolved.closed_loop.runs and not resolved.closed_loop.why_sampled


def test_the_plan_has_no_rollout():
    """At full size: no cache of keys and values, and choosing takes a part of what learning does."""
    settings = Settings(DIRECT_ANSWERS=True, NUM_GENERATIONS=1, MAX_COMPLETION_LEN=1, PROMPTS_PER_STEP=256)
    plan = plan_memory(settings, PlanInputs(REAL_CONFIG, H100, 900, "torch_flash", "prefix"))
    assert plan.engine is None and plan.micro_batch == plan.generation_batch == 32
    assert plan.generation == 0 < plan.learning and plan.peak < 70


def test_a_prompt_that_opens_another_channel_is_refused(direct_run, tmp_path):
    prompt = RENDERED.format("question") + "<|channel|>analysis<|message|>"
    path = write_csv(tmp_path / "odd.csv", HEADER, [[RENDERED.format("fine"), 0, 1], [prompt, 0, 1]])
    problem = only(direct_run(DATA=path, EVAL_SAMPLES=0).problems)
    assert "odd.csv, row 2: the prompt ends with '<|channel|>analysis<|message|>'" in problem
