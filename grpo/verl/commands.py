# SPDX-License-Identifier: Apache-2.0
"""The command lines of verl 0.9.1 for one folder OUTPUT_DIR, and the card of what they made."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.run.archive import base_name
from grpo.run.durable import write_text
from grpo.run.hub import MERGED_CODE, chosen_settings
from grpo.settings import ROOT
from grpo.verl.options import RL, SFT, Options, overrides, translated
from grpo.verl.rows import HELDOUT, SPEC, TRAIN, Prepared

VERSION = "0.9.1"
TRAINERS = {"sft": "supervised fine-tuning", "ppo": "PPO with a critic", "grpo": "GRPO"}
CONFIGS = ROOT / "scripts" / "verl"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's own, beside the checkpoints
# Every process of verl finds this project, and a critic without flash-attn.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_MODULES": "grpo.verl.critic"}


@dataclass(frozen=True)
class Place:
    """Where a trainer writes, and where its merged model goes."""

    out: Path
    trainer: str

    @property
    def checkpoints(self) -> Path:
        return self.out / self.trainer

    @property
    def merged(self) -> Path:
        return self.out / f"{self.trainer}-merged"

    def step(self) -> int | None:
        """The step of the newest checkpoint, None where there is none."""
        path = self.checkpoints / TRACKER
        return int(path.read_text()) if path.exists() else None


def places(p: Prepared) -> list[Place]:
    """The places of all trainers, that of the newest checkpoint last; those without one first."""

    def age(place: Place) -> float:
        path = place.checkpoints / TRACKER
        return path.stat().st_mtime if path.exists() else 0.0

    return sorted((Place(p.data.parent, trainer) for trainer in TRAINERS), key=age)


def model_options(keys: Sequence[str], p: Prepared, start: str | None) -> Options:
    """The model that training starts from: the merged folder `start`, or MODEL_ID."""
    folder = Path(p.settings.MODEL_ID).expanduser()
    path = start or (str(folder.absolute()) if folder.is_dir() else p.settings.MODEL_ID)
    return dict.fromkeys(keys, path)


def train_command(
    trainer: str, p: Prepared, gpus: int, start: str | None = None, config: str | None = None, more: Sequence[str] = ()
) -> list[str]:
    """The command line of `trainer`: options of the settings over the YAML `config` of scripts/verl/, `more` over both."""
    place, sft = Place(p.data.parent, trainer), trainer == "sft"
    options = translated(SFT if sft else RL, p.settings, p.sources) | {
        "data.train_files": str(p.data / TRAIN),
        "trainer.n_gpus_per_node": gpus,
        "trainer.default_local_dir": str(place.checkpoints),
        "trainer.experiment_name": place.out.name + "-" + trainer,
        "hydra.run.dir": str(place.out / "hydra"),
    }
    if sft:
        options |= model_options(["model.path"], p, start)
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m", "verl.trainer.sft_trainer"]
    else:
        options |= model_options(["actor_rollout_ref.model.path", "critic.model.path"], p, start) | {
            "data.val_files": str(p.data / HELDOUT),
            # Else the node's, not those of a job on it. Below nine for the queue and three a GPU verl waits without a word.
            "ray_kwargs.ray_init.num_cpus": max(len(os.sched_getaffinity(0)), 12 + 3 * gpus),
            "trainer.rollout_data_dir": str(place.out / "rollouts"),
            "+reward.custom_reward_function.reward_kwargs.spec": str(p.data / SPEC),
        }
        launch = ["verl.trainer.main_ppo"]
    search = ["--config-dir", str(CONFIGS), "--config-name", config or trainer]
    return [sys.executable, "-m", *launch, *search, *overrides(options), *more]


def merge_command(place: Place, step: int) -> list[str]:
    """The command line that writes a checkpoint in Hugging Face's format."""
    folder = place.checkpoints / f"global_step_{step}" / ("" if place.trainer == "sft" else "actor")
    folders = ["--local_dir", str(folder), "--target_dir", str(place.merged)]
    return [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", *folders]


def shown(command: Sequence[str]) -> str:
    """A command line as a shell takes it, with what it needs in the environment."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items()), shlex.join(command)])


def with_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` and what verl's processes need, in front of what a user has on PYTHONPATH."""
    paths = [ENVIRONMENT["PYTHONPATH"], *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def write_card(p: Prepared, place: Place) -> None:
    """README.md of a merged model, as the Hub reads it."""
    base, local = base_name(p.settings)
    named = "" if local else f"\nbase_model: {base}\nbase_model_relation: finetune"
    what = f"{base}, all weights trained by verl {VERSION} with {TRAINERS[place.trainer]}, step {place.step()}"
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{place.trainer}, verl]{named}
---

# {place.out.name}

This is {what}; rows and rewards are those of train_grpo.py.

{MERGED_CODE}

{chosen_settings(p.sources, dataclasses.asdict(p.settings))}"""
    write_text(place.merged / "README.md", text)
