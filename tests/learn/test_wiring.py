# SPDX-License-Identifier: Apache-2.0
"""Every setting that goes to TRL or PEFT, from the environment to the place where it is used in three real steps; and
what reward functions are given, by the checks before a run, in training and by TRL itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import CLEAN, RENDERED, ROOT, read_csv, write_csv
from datasets import Dataset
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from machines import CPU
from peft.tuners.lora import LoraLayer
from trainers import build, make
from trl import GRPOConfig, GRPOTrainer

from grpo.data.prompts import prompt_order
from grpo.learn import learner
from grpo.model.load import load_model, load_tokenizer
from grpo.plan.hub import read_json
from grpo.preflight.checks import preflight
from grpo.settings import FIELDS, load_settings, parse_value


def varied(completions, **columns):
    """Rewards that differ inside each group, so that their scale can be told."""
    return [float(number**2) for number in range(len(completions))]


def layers(run):
    return {name: layer for name, layer in run.trainer.model.named_modules() if isinstance(layer, LoraLayer)}


def each(run, value):
    """What all LoRA layers have; a list of two where they differ."""
    values = sorted({value(layer) for layer in layers(run).values()})
    return values[0] if len(values) == 1 else values


def reward_weights(run):
    """REWARDS, where the logged rewards are what its weights make of its functions."""
    rest = {round(float(row["reward"]) - 0.5 * (i % 6) ** 2, 4) for i, row in enumerate(run.completions)}
    return "format=0.25,test_wiring:varied=0.5" if rest <= {0.0, 0.25} and 0.25 in rest else rest


def reward_scale(run):
    """SCALE_REWARDS, from what the loss got for the logged rewards of the first step, in whatever order."""
    rewards = torch.tensor([float(row["reward"]) for row in run.completions[:6]]).view(2, 3)
    scales = {"none": 1.0, "group": rewards.std(1, keepdim=True), "batch": rewards.std()}
    advantages, centred = torch.cat(run.advantages)[:6].sort().values, rewards - rewards.mean(1, keepdim=True)
    scaled = {name: (centred / scale).flatten().sort().values for name, scale in scales.items()}
    return [name for name, values in scaled.items() if torch.allclose(advantages, values, rtol=1e-2)]


# What is set, and where it is seen at work. Steps have two prompts with three completions each.
WIRING = {
    "LORA_R": ("3", lambda run: each(run, lambda layer: layer.lora_A["default"].weight.shape[0])),
    "LORA_ALPHA": ("7.5", lambda run: each(run, lambda layer: layer.scaling["default"] * 3)),
    "LORA_DROPOUT": ("0.25", lambda run: each(run, lambda layer: layer.lora_dropout["default"].p)),
    "LORA_TARGETS": ("q_proj,v_proj", lambda run: ",".join(sorted({name.split(".")[-1] for name in layers(run)}))),
    "REWARDS": ("format=0.25,test_wiring:varied=0.5", reward_weights),
    "SCALE_REWARDS": ("none", lambda run: "".join(reward_scale(run))),
    "MASK_TRUNCATED": ("1", lambda run: run.trainer.mask_truncated_completions),
    "PROMPTS_PER_STEP": ("2", lambda run: len({row["prompt_id"] for row in run.completions[:6]})),
    "NUM_GENERATIONS": ("3", lambda run: len(run.completions) / 3 / 2),
    "MAX_COMPLETION_LEN": ("9", lambda run: run.generation.max_new_tokens),
    "TEMPERATURE": ("1.3", lambda run: run.generation.temperature),
    "TOP_P": ("0.9", lambda run: run.generation.top_p),
    "TOTAL_STEPS": ("3", lambda run: run.trainer.state.global_step),
    "LEARNING_RATE": ("0.003", lambda run: max(run.rates)),
    "WARMUP_STEPS": ("2", lambda run: run.rates.index(max(run.rates))),
    "LR_SCHEDULER": ("cosine", lambda run: run.trainer.lr_scheduler.lr_lambdas[0].func.__name__.split("_")[2]),
    "WEIGHT_DECAY": ("0.125", lambda run: run.decay),
    "MAX_GRAD_NORM": ("0.01", lambda run: round(max(run.norms), 6)),
    "GRADIENT_CHECKPOINTING": ("1", lambda run: run.trainer.model.is_gradient_checkpointing),
    "LOSS_TYPE": ("dapo", lambda run: run.losses[0]["loss_type"]),
    "BETA": ("0.02", lambda run: run.losses[0]["beta"]),
    "EPSILON": ("0.15", lambda run: run.losses[0]["epsilon_low"]),
    "EPSILON_HIGH": ("0.35", lambda run: run.losses[0]["epsilon_high"]),
    "SEED": ("7", lambda run: run.trainer.args.seed if run.order == list(prompt_order(4, 7, 6)) else run.order),
    "SAVE_STEPS": ("1", lambda run: run.state["save_steps"]),
    "SAVE_TOTAL_LIMIT": ("2", lambda run: len(list(run.folder.glob("checkpoint-*")))),
}
# Those which are neither TRL's nor PEFT's, and the room that uses them.
ELSEWHERE = {
    "MODEL_ID": "preflight", "ATTN_IMPL": "preflight", "EXPERTS": "preflight", "MICRO_BATCH": "plan",
    "PACKING": "preflight", "USE_VLLM": "preflight", "GENERATION_BATCH": "preflight", "VLLM_GPU_MEM": "plan",
    "INVALID_REWARD": "data", "EXPECTED_REWARD": "preflight", "DIRECT_ANSWERS": "learn", "ROLLOUT_SYNC": "rollout",
    "VLLM_EAGER": "rollout", "PARITY": "rollout", "PARITY_LIMIT": "rollout", "IS_CORRECTION": "learn",
    "IS_CLIP_MAX": "learn", "INIT_ADAPTER": "preflight", "NUM_TRAIN_EPOCHS": "preflight",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Three steps, and what was seen of them."""
    folder = tmp_path_factory.mktemp("wiring") / "run"
    folder.mkdir()
    environ = {name: text for name, (text, _) in WIRING.items()}
    settings, sources, problems = load_settings(environ | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(folder)})
    assert not problems and all(sources[name] == "environment" for name in WIRING)
    seen = SimpleNamespace(folder=folder, trainer=build(settings, tiny, folder), losses=[], rates=[], norms=[])
    seen.advantages = []
    seen.generation = seen.trainer.generation_config

    def watch(optimizer, *_):
        (seen.decay,) = {group["weight_decay"] for group in optimizer.param_groups if group["weight_decay"]} or {0.0}
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.rates.append(optimizer.param_groups[0]["lr"])
        seen.norms.append(torch.nn.utils.get_total_norm(gradients).item())

    def loss(logps, mask, advantages, whole, **options):
        seen.losses.append(options)
        seen.advantages.append(advantages)
        return real(logps, mask, advantages, whole, **options)

    real, make_optimizer = LigerFusedLinearGRPOFunction.ppo_loss_fn, seen.trainer.create_optimizer

    def create_optimizer(*arguments):
        optimizer = make_optimizer(*arguments)
        optimizer.register_step_pre_hook(watch)
        return optimizer

    seen.trainer.create_optimizer = create_optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner.LigerFusedLinearGRPOFunction, "ppo_loss_fn", loss)
        seen.trainer.train()
    seen.completions = read_csv(folder / "completions.csv")
    seen.order = [int(row["prompt_id"].split(":")[1]) - 1 for row in seen.completions[::3]]
    seen.state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    return seen


@pytest.mark.parametrize("name", WIRING)
def test_a_setting_arrives_where_it_is_used(run, name):
    text, read_value = WIRING[name]
    value, field = parse_value(name, text), FIELDS[name]
    tiny = field.metadata["tiny"]
    assert value != (field.default if tiny is None else tiny), "a default proves nothing"
    assert read_value(run) == (pytest.approx(value) if isinstance(value, float) else value)


def test_trackers_know_the_run_by_its_folder(run):
    assert run.trainer.args.project == run.trainer.args.run_name == run.folder.name


def test_every_setting_of_the_learner_has_its_place():
    groups = ("Model", "Rewards", "Rollouts", "Learner")
    wanted = {name for name, field in FIELDS.items() if field.metadata["group"] in groups}
    assert wanted - WIRING.keys() - ELSEWHERE.keys() == set(), "add it to the one or the other"
    assert not WIRING.keys() & ELSEWHERE.keys() and not ELSEWHERE.keys() - wanted
    for name, room in ELSEWHERE.items():
        assert any(f".{name}" in path.read_text(encoding="utf-8") for path in (ROOT / "grpo" / room).glob("*.py")), name


def test_the_seed_is_that_of_the_adapter(tiny, tmp_path):
    def weights(seed):
        torch.rand(seed)  # whatever was drawn before
        model = make(tiny, tmp_path, SEED=seed).model
        return torch.cat([p.flatten() for name, p in model.named_parameters() if "lora_A" in name])

    first, second, again = weights(3), weights(4), weights(3)
    assert torch.equal(first, again) and not torch.equal(first, second)


CALLS: list[dict] = []  # the arguments of each call of `record`


def record(prompts, completions, completion_ids, **columns):
    """A reward function that remembers its arguments."""
    arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    CALLS.append(arguments | columns)
    return [float(i % 3) for i in range(len(completions))]


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hour 9?"}]
OPENED = RENDERED.format("hour 8") + "<|channel|>final<|message|>"
# Rows of each form as they are written to a file, and the settings that go with them.
FORMS = {
    "question": ([{"question": "What is 4+4? ", "answer": "8"}, {"question": "hour 9?", "answer": "9"}], {}),
    "text": (
        [{"prompt": " hour 8 ", "tags": ["a", {"b": 1}]}, {"prompt": "hour 9?", "tags": None}],
        {"SYSTEM_PROMPT": "Say."},
    ),
    "messages": ([{"prompt": TALK, "level": 3}, {"prompt": TALK[1:], "level": 4}], {"SYSTEM_PROMPT": "Say."}),
    "rendered": ([{"prompt": RENDERED.format("hour 8"), "note": "x"}, {"prompt": OPENED, "note": "y"}], {}),
    "actions": (
        [{"prompt": "hour 8", "reward_action_0": 0.5, "reward_action_1": 1, "q_action_0": -1, "q_action_1": 0}] * 2,
        {"INVALID_REWARD": "0"},  # set, so that `record` may pay garbage
    ),
}  # fmt: skip


def checked_rows(tmp_path, form):
    """The preflight's result of rows of one of FORMS, or of the shipped GSM8K, with `record` as reward: CALLS holds
    its call."""
    form_rows, settings = FORMS.get(form, (None, {"TASK": "gsm8k"}))
    if form == "user":
        path = write_csv(
            tmp_path / "d.csv", ["user", "system", "note"], [[" hour 8", "Be brief.", "a"], ["hour 9", "", "b"]]
        )
    else:
        path = tmp_path / "d.jsonl"
        path.write_text("\n".join(map(json.dumps, form_rows or ())))
        path = ROOT / "data/gsm8k_train.jsonl" if form_rows is None else path
    environ = {"MODEL_ID": "tiny", "DATA": str(path), "EVAL_SAMPLES": "0", "OUTPUT_DIR": str(tmp_path / "checked")}
    CALLS.clear()
    result = preflight(CLEAN | environ | settings | {"REWARDS": "test_wiring:record"}, CPU)
    assert not result.problems and len(CALLS) == 1
    return result


def types_in(value):
    """The types of a value and of all that it holds."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return type(value), [(key, types_in(member)) for key, member in inner]


@pytest.mark.parametrize("form", [*FORMS, "user", "gsm8k"])
def test_the_check_calls_a_reward_function_as_training_does(form, tiny, tmp_path):
    """Argument by argument, for the completions that the check tries."""
    result = checked_rows(tmp_path, form)
    (check,) = CALLS
    assert len(check["prompts"]) == 4 * min(64, len(result.rows)), "garbage and two answers to each row that is tried"
    (tmp_path / "run").mkdir()
    ours = make(tiny, tmp_path / "run", rows=result.rows, REWARDS="test_wiring:record")
    numbers = {row.prompt: n for n, row in enumerate(result.rows)}
    inputs = [{"row": numbers[name]} for name in check["rendered_prompts"]]
    ours._calculate_rewards(inputs, [], [], check["completion_ids"])
    training = CALLS[1]
    assert training.keys() == check.keys()
    for name in check.keys() - {"trainer_state", "log_extra", "log_metric"}:
        assert training[name] == check[name] and types_in(training[name]) == types_in(check[name]), name
    for state in (check["trainer_state"], training["trainer_state"]):
        assert (state.global_step, state.epoch, state.log_history) == (0, 0, [])
    for name, arguments in (("log_extra", ("seen", [1.0])), ("log_metric", ("seen", 1.0))):
        assert check[name](*arguments) is training[name](*arguments) is None


TEXTS = [
    "<|channel|>analysis<|message|>Is it [1]?<|end|><|start|>assistant<|channel|>final<|message|>[2]<|return|>",
    "<|channel|>analysis<|message|>The load",
    "<|channel|>final<|message|><|return|>",
    "so [0]<|return|>",
]


@pytest.mark.parametrize("form", [*FORMS, "user", "gsm8k"])
def test_training_calls_a_reward_function_as_trl_does(form, tiny, tmp_path):
    """TRL's own trainer beside this one, on the same rows as its users write them, with the same completions."""
    rows = checked_rows(tmp_path, form).rows[:2]
    prompts = [row.columns.get("prompt") or row.columns.get("question") for row in rows]
    if form == "user":
        prompts = [[TALK[0], {"role": "user", "content": " hour 8"}], [{"role": "user", "content": "hour 9"}]]
    (tmp_path / "run").mkdir()
    ours = make(tiny, tmp_path / "run", rows=rows, REWARDS="test_wiring:record")
    theirs = GRPOTrainer(
        load_model(str(tiny), read_json(tiny / "config.json"), "eager").float(),
        record,
        GRPOConfig(str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=2, use_cpu=True, bf16=False),
        Dataset.from_list([{"prompt": "not used"}] * 2),
        processing_class=load_tokenizer(str(tiny)),
    )
    ids = theirs.processing_class(text=TEXTS)["input_ids"]
    data = [row.columns | {"prompt": prompt} for prompt, row in zip(prompts, rows, strict=True)]
    CALLS.clear()
    for each, inputs in ((theirs, data), (ours, [{"prompt": row.prompt, "row": n} for n, row in enumerate(rows)])):
        each._generate_single_turn = lambda *arguments: (ids, None)
        each.model.train()
        each._generate_and_score_completions([row for row in inputs for _ in range(2)])
    trl, training = CALLS
    assert training.keys() - trl.keys() - {"csv_prompt"} == {
        "raw_completions",
        "rendered_prompts",
        "truncated",
    }
    assert not trl.keys() - training.keys()
    for name in trl.keys() - {"trainer_state", "log_extra", "log_metric", "q_action_0", "q_action_1"}:  # q: as numbers
        assert training[name] == trl[name] and types_in(training[name]) == types_in(trl[name]), name
    assert type(trl["trainer_state"]) is type(training["trainer_state"])
    for name in ("log_extra", "log_metric"):
        assert trl[name].__func__ is training[name].__func__
    starts = ["<|start|>assistant"] * 4
    if form == "rendered":
        starts[2:] = [OPENED[OPENED.rindex("<|start|>") :]] * 2
    turns = [start + text for start, text in zip(starts, TEXTS, strict=True)]
    assert training["raw_completions"] == turns and training["truncated"] == [False, True, False, False]
    assert training["rendered_prompts"] == [row.prompt for row in rows for _ in range(2)]
