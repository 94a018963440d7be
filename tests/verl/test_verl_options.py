# SPDX-License-Identifier: Apache-2.0
"""Settings as verl's options. With VERL_SOURCE (a folder that holds the package verl 0.9.1) and Hydra installed they are
composed with verl's own configuration. Run: python -m pytest tests/verl/test_verl_options.py"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.settings import FIELDS, Problems, Settings, load_settings
from grpo.verl.commands import CONFIGS, TRAINERS, train_command
from grpo.verl.options import OURS, RL, SFT, VALUES, WITHOUT, check_counterparts, overrides, translated
from grpo.verl.rows import Prepared


def test_every_setting_has_a_place():
    """A new setting fails here until somebody says what it is to verl."""
    assert set(OURS) | set(WITHOUT) | set(RL) == set(FIELDS) and set(SFT) < set(RL)
    assert not OURS & WITHOUT.keys() and not WITHOUT.keys() & RL.keys() and not OURS & RL.keys()
    assert set(VALUES) <= OURS | set(RL)


@pytest.mark.parametrize("name", [name for name, known in VALUES.items() if name in RL])
def test_defaults_are_translated_and_each_value_has_a_word(name):
    for value in VALUES[name]:
        RL[name](Settings(**{name: value}))
    problems = Problems()
    check_counterparts(Settings(), dict.fromkeys(FIELDS, "default"), problems)
    assert not problems


CHANGES = {
    "PROMPTS_PER_STEP": (16, ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]),
    "EVAL_SAMPLES": (0, ["trainer.val_before_train=false", "trainer.test_freq=-1"]),
    "EVAL_STEPS": (0, ["trainer.test_freq=100"]),
    "BETA": (0.5, ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.5"]),
    "EPSILON": (0.3, ["actor_rollout_ref.actor.clip_ratio_low=0.3", "actor_rollout_ref.actor.clip_ratio_high=0.3"]),
    "IS_CORRECTION": ("none", ["algorithm.rollout_correction.rollout_is=null"]),
    "ATTN_IMPL": ("eager", ["critic.model.override_config.attn_implementation=eager"]),
    "LEARNING_RATE": (3e-6, ["actor_rollout_ref.actor.optim.lr=3e-06"]),
    "MICRO_BATCH": (3, ["critic.ppo_max_token_len_per_gpu=18144"]),
    "REPORT_TO": ("wandb", ["trainer.logger=[console,wandb]"]),
    "SCALE_REWARDS": ("none", ["algorithm.norm_adv_by_std_in_grpo=false"]),
    "LOSS_TYPE": ("dr_grpo", ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_setting_becomes(name):
    value, expected = CHANGES[name]
    before, after = (
        set(
            overrides(
                translated(
                    RL, Settings(**given), dict.fromkeys(FIELDS, "default") | dict.fromkeys(given, "environment")
                )
            )
        )
        for given in ({}, {name: value})
    )
    assert set(expected) <= after - before, after - before


@pytest.fixture
def prepared(tmp_path) -> Prepared:
    """Every setting that verl knows, given by the user, and a folder whose name needs quotes."""
    folder = tmp_path / "it's a run"
    given = {
        "MODEL_ID": "some/llama",
        "OUTPUT_DIR": str(folder),
        "LEARNING_RATE": "1e-5",
        "REPORT_TO": "wandb,tensorboard",
    }
    given |= {"ATTN_IMPL": "eager", "VLLM_GPU_MEM": "0.3", "MICRO_BATCH": "2", "EPSILON_HIGH": "0.28"}
    settings, sources, problems = load_settings(given)
    assert not problems
    return Prepared(settings, sources, problems, None, False, [], [], [], [])


# What verl's main() would see, without importing verl: its configuration alone, by the same Hydra.
STUB = """
import sys, hydra
from omegaconf import OmegaConf
@hydra.main(config_path=sys.argv.pop(1), config_name="ppo_trainer", version_base=None)
def main(config):
    # Beside these, `train_command` gives what verl computes with.
    OmegaConf.resolve(config)
    print("RATE", config.optim.lr if "optim" in config else config.actor_rollout_ref.actor.optim.lr)
    print("PLACE", config.trainer.default_local_dir)
main()
"""


@pytest.mark.parametrize(("trainer", "config"), [*((one, one) for one in TRAINERS), ("grpo", "gpt_oss")])
def test_verl_knows_every_option(prepared, tmp_path, trainer, config):
    if not (source := os.environ.get("VERL_SOURCE")):
        pytest.skip("VERL_SOURCE does not say where verl 0.9.1 is unpacked")
    pytest.importorskip("hydra")
    (tmp_path / "stub.py").write_text(STUB)
    command = train_command(trainer, prepared, 2, config=config)
    arguments = command[command.index("--config-dir") :]
    options = Path(source) / "verl" / "trainer" / "config"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "stub.py"), str(options), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "RATE 1e-05" in done.stdout and f"PLACE {tmp_path}/it's a run/{trainer}" in done.stdout


def test_the_rate_of_an_adapter_is_not_that_of_all_weights():
    given = translated(RL, Settings(), dict.fromkeys(FIELDS, "default"))
    assert not [key for key in given if key.endswith("optim.lr")]


def test_the_yaml_says_nothing_that_settings_say(prepared):
    """A fact stated once, but for what the YAML says where a setting is left alone."""
    given = translated(RL, Settings(), prepared.sources) | translated(SFT, Settings(), prepared.sources)
    keys = {key.rpartition(".")[2] for key in given} - {"lr"}
    text = "".join(path.read_text() for path in CONFIGS.glob("*.yaml"))
    assert not keys & set(re.findall(r"^ +(\w+): \S", text, re.MULTILINE))
