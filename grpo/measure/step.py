# SPDX-License-Identifier: Apache-2.0
"""This learner alone, and beside TRL's padded path on the same completions."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import pandas
import torch
from tokenizers import Tokenizer

from grpo.learn.trainer import Batch, Trainer
from grpo.measure.record import Figure, Json, tabled
from grpo.measure.rollout import measure_run, run_figures
from grpo.measure.trl_path import compare_step
from grpo.measure.variants import Variant, run_variants, write_result
from grpo.measure.watched import policy_of, weighed

LONGEST = 4000  # tokens of a completion
STEP = """
w1_learn_s | s | learning from the last step's completions (W1) once more, alone
w1_learn_peak_gib | GiB | of that, allocated beyond weights and sleeping engine
long_learn_peak_gib | GiB | 16 completions of 4,000 tokens, allocated beyond weights and sleeping engine
w2_learn_s | s | 96 completions, mean {w2_mean:.0f}, longest {w2_max} tokens, with their prompts
w1_learn_trl_s | s | TRL's padded path on them, in its fastest micro-batches within that memory: {w1_trl_micro_batch}
w1_trl_old_logps_s | s | of that, the pass for old log-probs, which TRL makes only beside vLLM
w1_trl_peak_gib | GiB | allocated beyond weights and sleeping engine
w1_speedup w1_speedup_without_pass | x | TRL's path against w1_learn_s, with and without that pass
gradient_difference | share | adapter's gradient on 16 of them, this learner against TRL's path: 2-norms
gradient_batching | share | TRL's path with micro-batches of 4 against 8
gradient_wrong_prompt | share | this learner with the prompts exchanged against TRL's path
"""


def padded_batch(trainer: Trainer, lengths: list[int]) -> Batch:
    """A step's batch as TRL pads it, (B, P) and (B, C), with random completions of these lengths after the run's first
    prompts, eight to a prompt."""
    rows, policy = trainer.run.rows, policy_of(trainer)
    prompts = [rows[i // 8 % len(rows)].prompt for i in range(len(lengths))]
    padded = trainer._tokenizer(text=prompts, padding=True, padding_side="left", return_tensors="pt")
    generator, shape = torch.Generator().manual_seed(0), (len(lengths), max(lengths))
    vocabulary = policy.get_input_embeddings().weight.shape[0]
    batch = {
        "prompt_ids": padded["input_ids"],
        "prompt_mask": padded["attention_mask"],
        "completion_ids": torch.randint(0, vocabulary, shape, generator=generator),
        "completion_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(),
        "advantages": torch.randn(len(lengths), generator=generator),
        "num_items_in_batch": torch.tensor(float(sum(lengths))),
    }
    return {name: value.to(policy.device) for name, value in batch.items()}


def our_learning(trainer: Trainer, batch: Batch, repeats: int = 1) -> dict[str, float]:
    """The cost, as `weighed` has it, of the last of `repeats` calls of `Trainer.learn`."""
    policy = policy_of(trainer)
    for _ in range(repeats):
        torch.cuda.empty_cache()
        with weighed() as cost:
            trainer.learn(policy, batch)
        policy.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    return cost


def real_lengths(path: Path, model: str) -> list[int]:
    """Tokens of 96 completions: those in the `completion` column of a CSV, in the model's vocabulary, repeated where
    there are fewer."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    texts = pandas.read_csv(path, usecols=["completion"], dtype=str, keep_default_na=False)["completion"]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
    return [lengths[i % len(lengths)] for i in range(96)]


def step_child(options: argparse.Namespace) -> int:
    """Measures one variant in this process: three steps through the entry point, learning alone, and what the options
    ask for besides."""
    with contextlib.ExitStack() as stack:
        code, watch = measure_run(options, stack, LONGEST)
        if code:
            return code
        trainer, batch, values = watch.trainer, watch.batch, watch.values(Path(options.run))
        policy_of(trainer).train()
        learning = our_learning(trainer, batch, 2)
        values |= {"w1_learn_s": learning["seconds"], "w1_learn_peak_gib": learning["peak_gib"]}
        write_result(options, options.child, values)
        if trainer.run.settings.MAX_COMPLETION_LEN >= LONGEST:
            longest = our_learning(trainer, padded_batch(trainer, [LONGEST] * 16))
            values["long_learn_peak_gib"] = longest["peak_gib"]
        if options.lengths:
            lengths = real_lengths(Path(options.lengths), options.model)
            values |= {"w2_mean": sum(lengths) / len(lengths), "w2_max": max(lengths)}
            values["w2_learn_s"] = our_learning(trainer, padded_batch(trainer, lengths))["seconds"]
        write_result(options, options.child, values)
        if options.trl and trainer.run.settings.EXPERTS == "bf16":  # TRL's path cannot compute with packed experts.
            values |= compare_step(trainer, batch, learning)
    write_result(options, options.child, values, done=True)
    return 0


def step_figures(variant: Variant, values: Json, prefix: str) -> list[Figure]:
    """Figures of a variant: those of its run, and of learning."""
    return run_figures(variant, values, prefix) + tabled(STEP, values, prefix)


def bench_step(options: argparse.Namespace) -> int:
    """The variants, one after the other. Returns 1 if one fails."""
    return step_child(options) if options.child else run_variants(options, step_figures)
