# SPDX-License-Identifier: Apache-2.0
"""Learning from episodes: against TRL's own trainer in the same environment, and against sums over all episodes."""

from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from expert_models import load
from helpers import read_csv
from ranked import in_ranks
from scripted import FINAL, TOKENIZER, GroupScript
from trainers import apart, gradient_of, make, plain_float32, seed_weights
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import gptoss_template
from worlds import Tally, few_digits

from grpo.data.files import Row
from grpo.environment.worker import Description
from grpo.learn.distributed import adapter_parameters
from grpo.learn.shared_rollout import load_rollout, part_of_rollout, save_rollout
from grpo.learn.step import group_advantages, returns_to_go, spread_over_turns, to_tensors, turn_advantages
from grpo.model.load import load_tokenizer
from grpo.process.ranks import Ranks
from grpo.reward.episode import Episode
from grpo.rollout.sampler import RankedSampler, Sample

# gpt-oss's template and TRL's own copy for training, without the quotes that these put around a result.
TEMPLATE, THEIR_TEMPLATE = (
    (Path(trl.__file__).parent / f"chat_templates/{name}.jinja")
    .read_text(encoding="utf-8")
    .replace("message.content|tojson", "message.content")
    for name in ("gptoss", "gptoss_training")
)
LIMIT, DATE = 420, "2025-11-06"


def trl_call(number):
    """A call in the form that TRL can parse."""
    return f' to=functions.add<|channel|>commentary json<|message|>{{"number": {number}}}<|call|>'


THOUGHT = "<|channel|>analysis<|message|>Six is far.<|end|><|start|>assistant"
SCRIPTS = {
    "Reach 6.": [
        [FINAL],
        [trl_call(2), FINAL],
        [trl_call(4), trl_call(1), FINAL],
        [THOUGHT + trl_call(60), trl_call(6), FINAL],
    ],
    "Reach 20.": [
        [trl_call(20), FINAL],
        [trl_call(9), trl_call(10), FINAL],
        [trl_call(1), "<|channel|>analysis<|message|>" + "on and on " * 90],
        [trl_call(8), FINAL],
    ],
}


def rows():
    return [
        Row("t.csv", n, (("user", "Add numbers."),), (), {"target": target}, trl_prompt="Add numbers.")
        for n, target in enumerate((6, 20))
    ]


def our_step(tiny, folder, monkeypatch, ranks=None, world="Tally", **changes):
    """A trainer, and its rollout of eight scripted episodes."""
    changes = {"PROMPTS_PER_STEP": 2, "REWARDS": "environment,worlds:few_digits=0.5"} | changes
    trainer = plain_float32(make(
        tiny, folder, ranks, rows(), NUM_GENERATIONS=4, MAX_COMPLETION_LEN=LIMIT, PROMPT_DATE=DATE,
        MAX_PROMPT_LEN=2000, ENVIRONMENT=f"worlds:{world}", MICRO_BATCH=2,
        REASONING_EFFORT="medium", **changes,
    ))  # fmt: skip
    seed_weights(trainer.model)
    resolved = trainer.run.resolved
    tools = [get_json_schema(Tally().add)]
    resolved.environment, resolved.files = Description("Tally", tools, True), SimpleNamespace(template=TEMPLATE)
    sampler = RankedSampler(GroupScript(SCRIPTS), ranks or Ranks())
    monkeypatch.setattr("grpo.learn.trainer.make_sampler", lambda *arguments: sampler)
    trainer.model.train()
    try:
        return trainer, trainer.new_rollout([row for row in trainer.run.rows for _ in range(4)])
    finally:
        trainer.run.environments.close()


def their_trainer(tiny, folder, config):
    """TRL's trainer in the same environment, with our weights."""
    tokenizer = load_tokenizer(str(tiny))
    tokenizer.chat_template, tokenizer.response_template = THEIR_TEMPLATE, gptoss_template
    data = [{"prompt": [{"role": "user", "content": "Add numbers."}], "target": target} for target in (6, 20)]
    options = {"output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "use_cpu": True}
    options |= {"max_completion_length": LIMIT, "bf16": False, "report_to": "none", "router_aux_loss_coef": 0.0}
    options |= {"loss_type": config.loss_type, "mask_truncated_completions": config.mask_truncated_completions}
    options |= {"reward_weights": [0.5], "chat_template_kwargs": {"reasoning_effort": "medium"}}
    options |= {"beta": config.beta, "scale_rewards": config.scale_rewards, "gradient_checkpointing": False}
    trainer = GRPOTrainer(
        load(tiny).float(), [few_digits], GRPOConfig(**options), processing_class=tokenizer, environment_factory=Tally,
        train_dataset=trl_data(data),
    )  # fmt: skip
    model = GroupScript(SCRIPTS)
    trainer._generate_single_turn = lambda prompts, *rest, **options: (
        [model.turn(TOKENIZER.decode(p))[:LIMIT] for p in prompts],
        None,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer, [data[n] for n in (0, 1) for _ in range(4)]


def trl_data(records):
    from datasets import Dataset

    return Dataset.from_list(records)


@pytest.mark.numeric
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_of_episodes_is_trls(tiny, tmp_path, monkeypatch, masked):
    """Prompts, tokens, masks, rewards and advantages, the loss and its gradient, and figures of the same names. TRL
    writes an error as Python does, with single quotes."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    ours, step = our_step(tiny, tmp_path / "ours", monkeypatch, MASK_TRUNCATED=masked, LOG_PROMPTS=True)
    theirs, inputs = their_trainer(tiny, tmp_path / "theirs", ours.args)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Today)
    batch = theirs._generate_and_score_completions(inputs)
    assert set(step.batch) == set(batch) - {"num_images"}
    assert batch["tool_mask"].min() == 0 and step.batch["advantages"].abs().sum() > 1
    single, double = TOKENIZER.get_vocab()["'"], TOKENIZER.get_vocab()['"']
    assert (batch["completion_ids"] == single).sum() == 4
    batch["completion_ids"][batch["completion_ids"] == single] = double
    for each in (step.batch, batch):  # With MASK_TRUNCATED TRL masks results of completions that are masked already.
        each["tool_mask"] = each["tool_mask"] * each["completion_mask"]
    for name, values in step.batch.items():
        torch.testing.assert_close(
            values, batch[name].to(values.dtype), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    figures = {name: values[-1] for name, values in theirs._metrics["train"].items() if values}
    figures = {name.replace("Tally", "environment"): value for name, value in figures.items()}
    assert step.metrics.keys() <= figures.keys()
    assert step.metrics == {name: pytest.approx(figures[name], rel=1e-5) for name in step.metrics}
    assert figures["tools/call_frequency"] * 8 == 10 and figures["tools/failure_frequency"] == pytest.approx(0.1)
    logged = read_csv(tmp_path / "ours" / "completions.csv")
    assert [row["truncated"] for row in logged] == ["0"] * 6 + ["1", "0"] and logged[6]["end"] == "length"
    assert ["Reach 6." in row["prompt"] for row in logged] == [True] * 4 + [False] * 4, "with the text of its reset"
    if not masked:
        assert [int(row["tokens"]) for row in logged] == batch["tool_mask"].sum(1).tolist()
    loss = ours.learn(ours.model, step.batch)
    theirs.model = ours.model
    gradient = gradient_of(ours)
    ours.model.zero_grad()
    their_loss = theirs._compute_loss(ours.model, batch)
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, gradient_of(ours), rtol=1e-3, atol=1e-6)
    entropy, their_entropy = (trainer._metrics["train"]["entropy"][-1] for trainer in (ours, theirs))
    assert entropy == pytest.approx(their_entropy, rel=1e-4), "of what the model wrote"


class Today:
    """The date that the prompts name."""

    @staticmethod
    def now():
        from datetime import datetime

        return datetime.fromisoformat(DATE)


def test_turn_advantages_by_hand():
    """Costs of three and two turns: each turn earns what comes from it on, less the mean of those that play it. The
    last turn is played by one episode alone, and keeps the advantage of the turn before."""
    to_go = returns_to_go(torch.tensor([-6.0, -2.0]), [[-1.0, -2.0, -3.0], [0.0, -2.0]])
    assert to_go[0].tolist() == [-6, -5, -3] and to_go[1, :2].tolist() == [-2, -2] and to_go[1, 2].isnan()
    assert turn_advantages(to_go, 2, "none").tolist() == [[-2, -1.5, -1.5], [2, 1.5, 0]]
    deviation = ((4 + 4 + 2.25 + 2.25) / 2) ** 0.5
    expected = [value / (deviation + 1e-4) for value in (-2, -1.5, -1.5, 2, 1.5, 0)]
    assert turn_advantages(to_go, 2, "group").flatten().tolist() == pytest.approx(expected)
    assert turn_advantages(to_go, 2, "batch").flatten().tolist() == pytest.approx(expected)
    two_groups = torch.tensor([[0.0], [2.0], [0.0], [6.0]])  # Their squares around their own means are 2 and 18.
    for scaling, deviations in (("group", [2**0.5] * 2 + [18**0.5] * 2), ("batch", [10**0.5] * 4)):
        expected = [value / (d + 1e-4) for value, d in zip((-1, 1, -3, 3), deviations, strict=True)]
        assert turn_advantages(two_groups, 2, scaling).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("scaling", ["group", "none"])
def test_episodes_of_one_turn_have_grpos_advantages(scaling):
    rewards = torch.tensor([0.5, 1.0, 3.0, -1.0, 0.0, torch.nan])
    to_go = returns_to_go(rewards, [[0.25]] * 6)
    assert turn_advantages(to_go, 3, scaling)[:, 0].tolist() == pytest.approx(
        group_advantages(rewards, 3, scaling)[0].tolist()
    )


def episode_of(turns, results, turn_rewards):
    """A sample of turns with results between them, in tokens."""
    ids, learned, starts = [], [], []
    for n, turn in enumerate(turns):
        starts.append(len(ids))
        for tokens, kind in ((turn, 1), (results[n] if n < len(results) else [], 0)):
            ids += tokens
            learned += [kind] * len(tokens)
    return Sample(ids, None, episode=Episode("", [], learned, starts, turn_rewards, None, "done"))


@pytest.mark.numeric
def test_the_gradient_is_that_of_the_expected_return(tiny, tmp_path):
    """Of two turns with two actions each, by a sum over all episodes in float64. An episode counts by its probability:
    the gradient of V = sum p(a) r(a) + sum p(a) p(b|a) r(a, b) is that of the returns-to-go, and results have none."""
    trainer = plain_float32(make(
        tiny, tmp_path, rows=rows(), PROMPTS_PER_STEP=1, NUM_GENERATIONS=6, LOSS_TYPE="dr_grpo", MAX_COMPLETION_LEN=20,
        MICRO_BATCH=2, TEMPERATURE=0.9, GRADIENT_CHECKPOINTING=False,
    ))  # fmt: skip
    seed_weights(trainer.model)
    prompt, actions = TOKENIZER("Add numbers."), (40, 41)
    prompt, results = prompt["input_ids"], {40: [7, 8, 9], 41: [11, 12]}
    first, second = {40: 0.3, 41: -0.8}, {(40, 40): 1.0, (40, 41): -0.5, (41, 40): 0.7, (41, 41): 2.0}
    other = make(tiny, tmp_path / "float64", rows=rows())
    seed_weights(other.model)
    model = other.model.eval().double()
    model.get_base_model().set_experts_implementation("eager")

    def log_prob(history, action):
        logits = model(input_ids=torch.tensor([prompt + history]), use_cache=False).logits[0, -1] / 0.9
        return logits.log_softmax(-1)[action]

    p_first = {a: log_prob([], a).exp() for a in actions}
    p_second = {(a, b): log_prob([a, *results[a]], b).exp() for a in actions for b in actions}
    value = sum(p_first[a] * first[a] for a in actions)
    value += sum(p_first[a] * p_second[a, b] * second[a, b] for a in actions for b in actions)
    value.backward()
    exact = torch.cat([p.grad.flatten() for p in adapter_parameters(model)])

    samples = [episode_of([[a], [b]], [results[a]], [first[a], second[a, b]]) for a in actions for b in actions]
    samples += [episode_of([[a]], [], [first[a]]) for a in actions]  # Any other second turn, which earns nothing.
    weights = [p_first[a] * p_second[a, b] for a in actions for b in actions]
    weights += [p_first[a] * (1 - sum(p_second[a, b] for b in actions)) for a in actions]
    batch = to_tensors([prompt] * 6, samples, trainer.run.settings, torch.device("cpu"), trainer.ends)
    turn_rewards = [sample.episode.turn_rewards for sample in samples]
    to_go = returns_to_go(torch.tensor([sum(values) for values in turn_rewards]), turn_rewards)
    weighted = to_go * torch.tensor([weight.item() for weight in weights])[:, None]
    batch["advantages"] = spread_over_turns(weighted, samples, batch["completion_ids"].size(1))
    trainer.model.train()
    trainer.learn(trainer.model, batch)
    assert apart(-gradient_of(trainer).double() * 6 * 20, exact) < 1e-5
    assert batch["num_items_in_batch"] == 10


def on_rank(ranks, tiny, folder):
    """The rollout and gradient of one of several processes, each with environments of its own."""
    if ranks.size > 1:
        forkserver._forkserver.__init__()  # The test process's own is not this fork's child.
    folder = folder / str(ranks.rank)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer, step = our_step(tiny, folder, monkeypatch, ranks, GRADIENT_CHECKPOINTING=False)
        trainer.learn(trainer.model, step.batch)
    values = {name: values.tolist() for name, values in step.batch.items()}
    return values, step.metrics, gradient_of(trainer).tolist()


@pytest.mark.numeric
def test_two_processes_play_and_learn_as_one_does(tiny, tmp_path):
    (tmp_path / "alone").mkdir()
    batch, metrics, gradient = on_rank(Ranks(), tiny, tmp_path / "alone")
    for theirs, their_metrics, their_gradient in in_ranks(2, on_rank, tiny, tmp_path):
        assert theirs == batch and their_metrics == metrics
        assert torch.tensor(their_gradient).allclose(torch.tensor(gradient), rtol=1e-4, atol=1e-7)


def test_a_rollout_of_turns_is_shared_and_kept(tiny, tmp_path, monkeypatch):
    """Two steps learn from halves of it, also after a checkpoint: advantages by turn, and masks, go with their rows."""
    steps = {"STEPS_PER_GENERATION": 2, "PROMPTS_PER_STEP": 1, "REWARDS": "environment=2"}
    trainer, rollout = our_step(tiny, tmp_path, monkeypatch, world="Paid", **steps)
    assert (
        rollout.batch["advantages"].shape == rollout.batch["completion_ids"].shape == rollout.batch["tool_mask"].shape
    )
    # The first prompt's episodes: calls are paid a tenth of the number, 60 raises, and the end what is missing of 6.
    paid = [[0.0], [0.2, 0.0], [0.4, 0.1, 0.0], [0.0, 0.6, 0.0]]
    to_go = 2 * returns_to_go(torch.tensor([-0.6, 0.2 - 0.4, 0.5 - 0.1, 0.6]), paid)  # The weight is that of both.
    expected = turn_advantages(to_go, 4, "group")
    for row, advantages, turns in zip(rollout.batch["advantages"], expected, paid, strict=False):
        values = list(dict.fromkeys(row[row != 0].tolist()))
        assert values == pytest.approx([value for value in advantages[: len(turns)].tolist() if value], abs=1e-5)
    save_rollout(rollout, tmp_path / "rollout.pt")
    kept = load_rollout(tmp_path / "rollout.pt", torch.device("cpu"))
    gradients = []
    for source in (rollout, kept):
        trainer.model.zero_grad()
        for n in (0, 1):
            part = part_of_rollout(source, n, 2)
            assert (part[0]["tool_mask"] == rollout.batch["tool_mask"][4 * n : 4 * n + 4]).all()
            trainer.learn(trainer.model, *part)
        gradients.append(gradient_of(trainer))
    assert torch.equal(*gradients) and gradients[0].norm() > 0


def environment(completions, **columns):
    """A function of the user's own, which gives nothing for single turns."""
    return [float(len(text)) for text in completions]


def test_an_own_function_of_that_name_has_no_rewards_of_turns(tiny, tmp_path, monkeypatch):
    """What the environment paid for its calls is no part of these rewards, so it is not taken from them."""
    trainer, rollout = our_step(tiny, tmp_path, monkeypatch, world="Paid", REWARDS="test_turns:environment")
    assert trainer.scorer.names == ["environment"] and rollout.batch["advantages"].shape == (8,)


@pytest.mark.numeric
@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask", "none"])
def test_log_probs_of_results_change_nothing(tiny, tmp_path, monkeypatch, correction):
    """Neither in the importance correction nor in the ratios of steps that share a rollout: nobody sampled these."""
    trainer, step = our_step(tiny, tmp_path, monkeypatch, IS_CORRECTION=correction, NUM_ITERATIONS=2)
    sampled, results = step.batch["old_per_token_logps"] + 0.1, step.batch["tool_mask"] == 0
    gradients = []
    for value in (0.0, -7.0):
        logps = sampled.masked_fill(results, value)
        trainer.model.zero_grad()
        trainer.learn(
            trainer.model, step.batch | dict.fromkeys(("sampling_per_token_logps", "old_per_token_logps"), logps)
        )
        gradients.append(gradient_of(trainer))
    assert results.any() and gradients[0].norm() > 0 and torch.equal(*gradients)
