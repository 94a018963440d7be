# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: trains an adapter on the rows' answers, from which GRPO can start."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from grpo.environment.pool import EnvironmentPool
from grpo.learn.finite import FiniteCallback
from grpo.learn.options import training_options
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import load_adapter, load_base, load_generation_config, load_tokenizer, stop_tokens
from grpo.output.archive import model_card
from grpo.output.durable import move_files, write_text
from grpo.output.folder import prepare_run
from grpo.output.layout import ADAPTER, UNFINISHED
from grpo.preflight.adapter import lora_options
from grpo.preflight.checks import run_records
from grpo.preflight.resolve import ResolvedRun
from grpo.rollout.demonstrations import Pairs, Recital, play_demonstrations
from grpo.rollout.episodes import EpisodePlayer
from grpo.rollout.sampler import EndTokens, rollout_sampling
from grpo.settings.table import Settings

LOG_LINES = 10  # The training prints about this many lines.


def tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], answers: Sequence[Sequence[str]]
) -> Pairs:
    """`input_ids` and `labels` of every row that has an answer, the only one of its list. The label of each token of
    the prompt is -100, which the loss leaves out. Prompt and answer are tokenized separately, like prompt and
    completion of a rollout."""
    pairs = [(prompt, answer) for prompt, own in zip(prompts, answers, strict=True) for answer in own]
    prompt_ids, answer_ids = (tokenizer(text=list(texts))["input_ids"] for texts in zip(*pairs, strict=True))
    rows = list(zip(prompt_ids, answer_ids, strict=True))
    return {
        "input_ids": [prompt + answer for prompt, answer in rows],
        "labels": [[-100] * len(prompt) + answer for prompt, answer in rows],
    }


def sft_options(s: Settings, cuda: bool, rows: int) -> dict[str, Any]:
    """Arguments of TRL's SFTConfig. A micro-batch has at most `rows` rows, and a step PROMPTS_PER_STEP."""
    rows = max(n for n in range(1, min(rows, s.PROMPTS_PER_STEP) + 1) if s.PROMPTS_PER_STEP % n == 0)
    return {
        **training_options(s, cuda),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": s.PROMPTS_PER_STEP // rows,
        "max_length": None,  # Nothing needs to be cut: the preflight has measured the prompts.
        "logging_steps": max(1, s.TOTAL_STEPS // LOG_LINES),
        "save_strategy": "no",
        "report_to": "none",
    }


def shown_pairs(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase, turns: Sequence[Sequence[str]]) -> Pairs:
    """`input_ids` and `labels` of the `turns` of each row: of its answer, or of its episode. Raises InputError."""
    s, files = resolved.settings, resolved.files
    if not resolved.environment:
        return tokenize_pairs(tokenizer, [row.prompt for row in resolved.rows], turns)
    assert files
    ends = EndTokens(stop_tokens(load_generation_config(str(files.folder)), tokenizer), tokenizer.pad_token_id)
    with contextlib.closing(EnvironmentPool(s.ENVIRONMENT, s.ENV_TIMEOUT)) as pool:
        tools, template = resolved.environment.tools, files.template
        player = EpisodePlayer(Recital(), pool, tokenizer, ends, s, tools, template, at_once=1, wants_copy=False)
        return play_demonstrations(player, resolved.rows, turns, rollout_sampling(s, 0))


def learn_answers(resolved: ResolvedRun, turns: Sequence[Sequence[str]]) -> Path:
    """Train an adapter on the `turns` that `resolved.rows` show (none: the row is left out), and write it to OUTPUT_DIR
    with its tokenizer, model card and settings.json; returns the folder.

    Raises ValueError where the model cannot be loaded, InputError for an episode that does not go as shown. OUTPUT_DIR
    changes only after training."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    s, folder, files, plan = resolved.settings, resolved.state.folder, resolved.files, resolved.plan
    assert files and plan  # A run that passed its checks has both.
    model_path = str(files.folder)
    tokenizer = load_tokenizer(model_path)
    pairs = shown_pairs(resolved, tokenizer, turns)
    model = load_base(s, model_path, files.config, "eager", plan)
    options = sft_options(s, torch.cuda.is_available(), plan.micro_batch)
    with experts_wrapped(model):
        trainer = SFTTrainer(
            model,
            SFTConfig(**options),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
            peft_config=LoraConfig(**lora_options(s)),
            callbacks=[FiniteCallback()],
        )
    policy: PeftModel = trainer.accelerator.unwrap_model(trainer.model)
    if s.INIT_ADAPTER:
        load_adapter(policy, s.INIT_ADAPTER)
    trainer.train()
    prepare_run(resolved.state, s, run_records(resolved))
    # PEFT's own card would name the path of the base model's files, and PEFT has no hook for another text.
    policy.create_or_update_model_card = lambda output_dir: write_text(  # type: ignore[method-assign]
        Path(output_dir) / "README.md", model_card(s, s.TOTAL_STEPS, "", adapter=folder)
    )
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)  # A killed process may have left one.
    policy.save_pretrained(str(unfinished))
    tokenizer.save_pretrained(str(unfinished))
    move_files(unfinished, folder, ADAPTER)  # The adapter is last: a folder with this file counts as complete.
    return folder
