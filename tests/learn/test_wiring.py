# SPDX-License-Identifier: Apache-2.0
"""Every setting that goes to TRL or PEFT, from the environment into the trainer; and what reward functions are given,
by the checks before a run, in training and by TRL itself."""

import json

import pytest
from datasets import Dataset
from expert_models import load
from helpers import CLEAN, RENDERED
from machines import CPU
from peft.tuners.lora import LoraLayer
from trainers import build, make, score_completions
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

from grpo.learn.options import GRPO_SETTINGS, TRAINING_SETTINGS
from grpo.model.load import load_tokenizer
from grpo.preflight.checks import preflight
from grpo.rollout.sampler import rollout_sampling
from grpo.settings.environment import load_settings
from grpo.settings.parsing import parse_value
from grpo.settings.table import FIELDS


def layers(trainer):
    return {name: layer for name, layer in trainer.model.named_modules() if isinstance(layer, LoraLayer)}


def each(trainer, value):
    """What all LoRA layers have; a list where they differ."""
    values = sorted({value(layer) for layer in layers(trainer).values()})
    return values[0] if len(values) == 1 else values


# What is set, and where the trainer has it. Steps have two prompts with three completions each.
WIRING = {
    "LORA_R": ("3", lambda t: each(t, lambda layer: layer.lora_A["default"].weight.shape[0])),
    "LORA_ALPHA": ("7.5", lambda t: each(t, lambda layer: layer.scaling["default"] * 3)),
    "LORA_DROPOUT": ("0.25", lambda t: each(t, lambda layer: layer.lora_dropout["default"].p)),
    "LORA_TARGETS": ("q_proj,v_proj", lambda t: ",".join(sorted({name.split(".")[-1] for name in layers(t)}))),
    "REWARDS": ("format=0.25,action=0.5", lambda t: t.reward_summary.replace(" x ", "=").replace(", ", ",")),
    "SCALE_REWARDS": ("none", lambda t: t.scale_rewards),
    "MASK_TRUNCATED": ("1", lambda t: t.mask_truncated_completions),
    "PROMPTS_PER_STEP": ("2", lambda t: t.args.per_device_train_batch_size / 3),
    "STEPS_PER_GENERATION": ("4", lambda t: t.args.generation_batch_size / 6),
    "NUM_ITERATIONS": ("5", lambda t: t.num_iterations),
    "NUM_GENERATIONS": ("3", lambda t: t.num_generations),
    "MAX_COMPLETION_LEN": ("9", lambda t: rollout_sampling(t.run.settings, 0).max_tokens),
    "TEMPERATURE": ("1.3", lambda t: rollout_sampling(t.run.settings, 0).temperature),
    "TOP_P": ("0.9", lambda t: rollout_sampling(t.run.settings, 0).top_p),
    "TOTAL_STEPS": ("3", lambda t: t.args.max_steps),
    "LEARNING_RATE": ("0.003", lambda t: t.args.learning_rate),
    "WARMUP_STEPS": ("2", lambda t: t.args.warmup_steps),
    "LR_SCHEDULER": ("cosine", lambda t: t.args.lr_scheduler_type.value),
    "WEIGHT_DECAY": ("0.125", lambda t: t.args.weight_decay),
    "MAX_GRAD_NORM": ("0.01", lambda t: t.args.max_grad_norm),
    "GRADIENT_CHECKPOINTING": ("1", lambda t: t.args.gradient_checkpointing),
    "LOSS_TYPE": ("dapo", lambda t: t.loss_type),
    "IMPORTANCE_SAMPLING_LEVEL": ("sequence", lambda t: t.importance_sampling_level),
    "BETA": ("0.02", lambda t: t.beta),
    "EPSILON": ("0.15", lambda t: t.epsilon_low),
    "EPSILON_HIGH": ("0.35", lambda t: t.epsilon_high),
    "SEED": ("7", lambda t: t.args.seed if t.args.seed == t.args.data_seed else None),
    "SAVE_STEPS": ("1", lambda t: t.args.save_steps),
}


@pytest.fixture(scope="module")
def trainer(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wiring")
    environ = {name: text for name, (text, _) in WIRING.items()}
    settings, sources, problems = load_settings(environ | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(folder)})
    assert not problems and all(sources[name] == "environment" for name in WIRING)
    return build(settings, tiny, folder)


@pytest.mark.parametrize("name", WIRING)
def test_a_setting_arrives_where_it_is_used(trainer, name):
    text, read_value = WIRING[name]
    value, field = parse_value(name, text), FIELDS[name]
    tiny = field.metadata["tiny"]
    assert value != (field.default if tiny is None else tiny), "a default proves nothing"
    assert read_value(trainer) == (pytest.approx(value) if isinstance(value, float) else value)


def test_trackers_know_the_run_by_its_folder(trainer):
    assert trainer.args.project == trainer.args.run_name == trainer.run.folder.name


def test_a_changed_save_steps_holds_for_a_resumed_run(trainer):
    """transformers takes that of the checkpoint otherwise."""
    state = TrainerState(save_steps=50)
    trainer.timer.on_train_begin(trainer.args, state, TrainerControl())
    assert state.save_steps == 1


def test_no_setting_that_trl_gets_is_left_out():
    assert WIRING.keys() >= {*TRAINING_SETTINGS, *GRPO_SETTINGS}


CALLS: list[dict] = []


def record(prompts, completions, completion_ids, **columns):
    """A reward function that remembers its arguments."""
    CALLS.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids} | columns)
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
    """Rows of one of FORMS after the check before a run, with `record` as reward: CALLS holds the check's call."""
    form_rows, settings = FORMS[form]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, form_rows)))
    environ = {"MODEL_ID": "tiny", "DATA": str(path), "EVAL_SAMPLES": "0", "OUTPUT_DIR": str(tmp_path / "checked")}
    CALLS.clear()
    result = preflight(CLEAN | environ | settings | {"REWARDS": "test_wiring:record"}, CPU)
    assert not result.problems and len(CALLS) == 1
    return result.rows


def types_in(value):
    """The types of a value and of all that it holds."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return type(value), [(key, types_in(member)) for key, member in inner]


def assert_equal_arguments(call, other, names):
    for name in names:
        assert call[name] == other[name] and types_in(call[name]) == types_in(other[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_the_check_calls_a_reward_function_as_training_does(form, tiny, tmp_path):
    """Argument by argument, for the completions that the check tries."""
    rows = checked_rows(tmp_path, form)
    (check,) = CALLS
    answers = 5 if form == "question" else 4
    assert len(check["prompts"]) == answers * len(rows), "garbage, [0], [1], and the column `answer` of each row"
    trainer = make(tiny, tmp_path, rows=rows, REWARDS="test_wiring:record")
    numbers = {row.prompt: n for n, row in enumerate(rows)}
    inputs = [rows[numbers[name]] for name in check["rendered_prompts"]]
    stops = trainer.eos_token_ids
    trainer.scorer.group = 1
    trainer.scorer.score(inputs, check["completion_ids"], stops, trainer.state)
    training = CALLS[1]
    assert training.keys() == check.keys()
    assert_equal_arguments(training, check, check.keys() - {"trainer_state", "log_extra", "log_metric"})
    for call in (check, training):
        state = call["trainer_state"]
        assert (state.global_step, state.epoch, state.log_history) == (0, 0, [])
        assert call["log_extra"]("seen", check["completions"]) is call["log_metric"]("seen", 1.0) is None


TEXTS = [
    "<|channel|>analysis<|message|>Is it [1]?<|end|><|start|>assistant<|channel|>final<|message|>[2]<|return|>",
    "<|channel|>analysis<|message|>The load",
    "<|channel|>final<|message|><|return|>",
    "so [0]<|return|>",
]


@pytest.mark.parametrize("form", FORMS)
def test_training_calls_a_reward_function_as_trl_does(form, tiny, tmp_path):
    """TRL's own trainer beside this one, on the same rows as its users write them, with the same completions."""
    rows = checked_rows(tmp_path, form)
    ours = make(tiny, tmp_path, rows=rows, REWARDS="test_wiring:record")
    theirs = GRPOTrainer(
        load(tiny).float(),
        record,
        GRPOConfig(str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=2, use_cpu=True, bf16=False),
        Dataset.from_list([{"prompt": "not used"}] * 2),
        processing_class=load_tokenizer(str(tiny)),
    )
    ids = theirs.processing_class(text=TEXTS)["input_ids"]
    data = [row.columns | {"prompt": row.columns.get("prompt") or row.columns["question"]} for row in rows]
    CALLS.clear()
    theirs._generate_single_turn = lambda *arguments: (ids, None)
    theirs.model.train()
    theirs._generate_and_score_completions([row for row in data for _ in range(2)])
    score_completions(ours, ids)
    trl, training = CALLS
    assert trl.keys() <= training.keys()
    assert training.keys() - trl.keys() - {"csv_prompt"} == {"raw_completions", "rendered_prompts", "truncated"}
    differing = {"trainer_state", "log_extra", "log_metric", "q_action_0", "q_action_1"}  # q: as numbers
    assert_equal_arguments(training, trl, trl.keys() - differing)
    assert type(trl["trainer_state"]) is type(training["trainer_state"])
    starts = ["<|start|>assistant"] * 4
    if form == "rendered":
        starts[2:] = [OPENED[OPENED.rindex("<|start|>") :]] * 2
    turns = [start + text for start, text in zip(starts, TEXTS, strict=True)]
    assert training["raw_completions"] == turns and training["truncated"] == [False, True, False, False]
    assert training["rendered_prompts"] == [row.prompt for row in rows for _ in range(2)]
