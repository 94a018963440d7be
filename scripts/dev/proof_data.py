# SPDX-License-Identifier: Apache-2.0
"""The proof's scales and rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.tasks.tes.dataset import synthetic_files
from scripts.dev.gptoss_format import GPT_OSS_20B
from scripts.dev.record import split_settings
from scripts.dev.warmup import TINY_RECIPE, Recipe


@dataclass(frozen=True)
class Scale:
    """The model and the data that a proof starts from, and the settings of its run."""

    recipe: Recipe  # warm-up of the model that GRPO starts from
    train_windows: int  # windows of the rows for GRPO, without those of the short hours
    heldout_windows: int
    settings: Mapping[str, str]  # settings of train_grpo.py


# It has 43M weights besides the embeddings. hidden is a multiple of 256 and intermediate of 128, which vLLM's MXFP4
# kernels prefer; head_dim is gpt-oss's.
MID = GPT_OSS_20B | {
    "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 384, "num_local_experts": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
# The first sliding layer looks at neighbours; the second at an hour's own numbers and at the same number an hour
# earlier (a line of the forecast has 26 tokens).
MID_RECIPE = Recipe(
    MID, "full", windows=2400, probe_windows=60, seconds=300, steps=100_000, batch=64, lr=1e-3,
    distances=((1, 2, 3, 4, 5, 6, 7, 8), (1, 8, 6, 11, 17, 26, 20, 3), (), (0,)), most_factor=2.0,
)  # fmt: skip
# Here the second one looks from a call's level back at the state: 37, 31 and 22 tokens to stored energy, load and CO2,
# and 19 to the line of the hour before.
DAY_RECIPE = replace(
    MID_RECIPE, prompt="day", windows=1200, seconds=float("inf"), steps=560, batch=32,
    distances=(MID_RECIPE.distances[0], (37, 31, 22, 1, 19, 6, 12, 3), (), (0,)),
)  # fmt: skip
# PARITY=off: this model's predictions are so even that the check's adapter hardly changes the log-probs of fixed
# tokens, and the check refuses a model where it sees no effect (on an H200 0.0005 nats with it, 0.0001 without).
MID_RUN = """REWARDS=regret EXPECTED_REWARD=1 EVAL_SAMPLES=8 EVAL_STEPS=125 SEED=1 USE_VLLM=1 PARITY=off
    PROMPTS_PER_STEP=32 NUM_GENERATIONS=8 MAX_COMPLETION_LEN=24 TOTAL_STEPS=200 LEARNING_RATE=7e-4 LR_SCHEDULER=linear
    LORA_R=32 LORA_ALPHA=64 SAVE_STEPS=100"""
SMALL_RUN = """REWARDS=regret EXPECTED_REWARD=1 EVAL_SAMPLES=2 SEED=1 USE_VLLM=0 PROMPTS_PER_STEP=8 NUM_GENERATIONS=8
    MAX_COMPLETION_LEN=12 MAX_PROMPT_LEN=256 TOTAL_STEPS=4 LEARNING_RATE=4e-3 LORA_R=8 LORA_ALPHA=16 SAVE_STEPS=4
    GRADIENT_CHECKPOINTING=0 REASONING_EFFORT=low"""
CPU_RUN = f"""{SMALL_RUN} EVAL_SAMPLES=8 PROMPTS_PER_STEP=16 TOTAL_STEPS=400 LR_SCHEDULER=linear LORA_R=32 LORA_ALPHA=64
    SAVE_STEPS=100"""
SCALES = {
    "mid": Scale(MID_RECIPE, train_windows=400, heldout_windows=32, settings=split_settings(MID_RUN)),
    # With the toy model and compact prompts: `cpu` on one CPU core, `small` in seconds for the tests.
    "cpu": Scale(replace(TINY_RECIPE, steps=1500), 60, 32, split_settings(CPU_RUN)),
    "small": Scale(replace(TINY_RECIPE, windows=20, probe_windows=4, steps=60), 10, 4, split_settings(SMALL_RUN)),
}
DATA_SEED = 20_000  # seed of the generated days
OTHER_PROFILE = "profile_other.csv"  # other days than those by which a run chooses best/
# A chain has 29 tokens with o200k. The exact evaluation of small models covers only answers without a chain.
REASON_RUN = split_settings("MAX_COMPLETION_LEN=40 EVAL_EXACT=0")
# The probability that an answer follows the plan of its chain: the chain decides, as in a model that reasons. With 0.9
# the toy's answers overruled their plans for the first 140 steps.
FOLLOW = 0.99
PLAN_BACK = 7  # tokens from the plan to the position that predicts the answer's action


def reasoning(scale: Scale) -> Scale:
    """The scale with a short chain of reasoning before every answer. A head of the first layer looks back at the plan:
    without such a head, answers of the toy model did not follow plans after 700 steps. The run has twice the prompts,
    half the rate and a slow start: with the settings of a run without chains the toy soon gave all prompts one answer.
    """
    first, *others = scale.recipe.distances
    if PLAN_BACK not in first:
        first = (*first[:-1], PLAN_BACK)
    recipe = replace(scale.recipe, follow=FOLLOW, distances=(first, *others))
    run = scale.settings
    slower = {
        "PROMPTS_PER_STEP": str(2 * int(run["PROMPTS_PER_STEP"])),
        "LEARNING_RATE": f"{float(run['LEARNING_RATE']) / 2:g}",
        "WARMUP_STEPS": str(int(run["TOTAL_STEPS"]) // 20),
    }
    return replace(scale, recipe=recipe, settings={**run, **slower, **REASON_RUN})


def write_data(folder: Path, scale: Scale) -> None:
    """Writes the CSVs of the run, made as those under data/: training rows with short hours and varied loads, held-out
    rows, and the hourly profiles of the held-out windows and of others that choose nothing."""
    prompt = scale.recipe.prompt
    heldout = {prompt: scale.heldout_windows}
    factor = {prompt: scale.recipe.most_factor}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in synthetic_files(DATA_SEED, (prompt,), {prompt: scale.train_windows}, heldout, factor):
        (folder / name).write_bytes(text.encode())
    ((_, text),) = synthetic_files(DATA_SEED + 1, (), heldout=heldout)
    (folder / OTHER_PROFILE).write_bytes(text.encode())
