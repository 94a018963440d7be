# SPDX-License-Identifier: Apache-2.0
"""The worth of chains, from models whose chains and answers are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo.measure import chains
from grpo.model.warmup_rows import CHAIN

PROMPT = "hour 8 store 16 load 45 co2 36 next 41"
ROWS = [
    SimpleNamespace(prompt=f"{letter} {PROMPT}", columns={f"reward_action_{k}": reward for k, reward in enumerate(row)})
    for letter, row in (("a", (0.1, 0.6, 0.2, 0.1)), ("b", (0.7, 0.1, 0.1, 0.1)))
]


class KnownModel:
    """Trained, it plans action 1 and does what the chain says; its base plans action 0, says something else to the
    second prompt, and answers evenly."""

    tokenizer = SimpleNamespace(batch_decode=lambda completions: completions)

    def complete(self, prompts: list[str], base: bool) -> list[str]:
        plan = 0 if base else 1
        texts = [CHAIN.format(16, 45, 36, 41, plan) + f"<|channel|>final<|message|>[{plan}]<|return|>" for _ in prompts]
        return [texts[0], "<|channel|>final<|message|>[3]<|return|>"] if base else texts

    def probabilities(self, prompts: list[str], actions: int, greedy: bool, base: bool) -> np.ndarray:
        assert all(prompt.startswith(row.prompt) for prompt, row in zip(prompts, ROWS, strict=True))
        assert not any("final" in prompt for prompt in prompts), "the answer is asked for"
        obeyed = [[float(f"action {k}<|end|>" in prompt) for k in range(actions)] for prompt in prompts]
        return np.full((len(prompts), actions), 0.25) if base else np.array(obeyed)


def test_chains_are_counted_and_every_answer_is_asked_behind_every_chain(monkeypatch):
    monkeypatch.setattr(chains, "prepare", lambda options: (None, None, ROWS))
    monkeypatch.setattr(chains, "start_model", lambda *arguments, **named: KnownModel())
    figures = chains.chain_figures(Path("run"), Path("heldout.csv"))
    assert (figures["plan_best_base"], figures["plan_best_trained"]) == (0, 0.5)
    rewards = {name.removeprefix("reward_chain_"): value for name, value in figures.items() if "reward" in name}
    assert rewards == pytest.approx(
        {
            "base_answer_base": 0.25,
            "base_answer_trained": 0.05,  # action 0 of the first row, and nothing where no chain says it
            "trained_answer_base": 0.25,
            "trained_answer_trained": 0.35,  # action 1 of both rows
        }
    )
