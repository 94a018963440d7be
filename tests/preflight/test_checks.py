# SPDX-License-Identifier: Apache-2.0
"""Checks of settings, memory and disk, all of them at once, and what a run is warned of."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import types

import pytest
from conftest import CLEAN, RENDERED, ROOT, run_script, write_csv
from machines import CPU, H100, only

from grpo.plan.hub import REAL_CONFIG, ModelFiles
from grpo.plan.memory import Shapes
from grpo.preflight import banner, checks, resolve
from grpo.preflight.checks import check_disk, check_memory, check_settings, preflight
from grpo.run.durable import write_sealed
from grpo.run.folder import RunState
from grpo.run.logs import banner_text
from grpo.run.ranks import Ranks
from grpo.settings import FIELDS, Problems, Settings, load_settings
from grpo.tasks.simulator import SimulationPlan

HEADER = ["prompt", "reward_action_0", "reward_action_1"]
CONFLICTS = [
    ({"GENERATION_BATCH": 5}, CPU, ["GENERATION_BATCH: 5 does not divide", "12 x 8 = 96", "nearest that does is 4"]),
    ({"PROMPTS_PER_STEP": 50_001}, CPU, ["50001 x 8 = 400008 completions in one step, and 100,000 are the most"]),
    ({"ATTN_IMPL": "torch_flahs"}, H100, ["'torch_flahs' is unknown; the nearest is torch_flash", "flash_attention_3"]),
    ({"ATTN_IMPL": "torch_flahs"}, CPU, ["'torch_flahs' is unknown"]),
    ({"ATTN_IMPL": "torch_flash"}, CPU, ["needs a GPU"]),
    ({"ATTN_IMPL": "flash_attention_3"}, dataclasses.replace(H100, capability=8.0), ["made for Hopper"]),
    ({"ATTN_IMPL": "org/kernel", "PACKING": "prefix"}, H100, ["PACKING: org/kernel takes padded rows only"]),
    ({}, dataclasses.replace(H100, capability=7.5), ["GPU: ", "compute capability 7.5"]),
    ({"TEMPERATURE": 2.1}, H100, ["takes at most 2"]),
    ({"EVAL_TEMPERATURE": 2.1}, H100, ["EVAL_TEMPERATURE", "takes at most 2"]),
    ({"LOSS_TYPE": "vespo", "IS_CORRECTION": "sequence_mask"}, CPU, ["vespo"]),
    *(
        ({"LORA_TARGETS": f"q_proj,{name}"}, CPU, [repr(name), "takes an adapter", "all-linear", "q_proj", "7.experts"])
        for name in ("gate_up_proj", "router", "x.experts", "-1.experts", "99999.experts", "7.mlp.experts.up_proj")
    ),
    ({"LORA_TARGETS": "q_proj, v_porj"}, CPU, ["'v_porj' is nothing in gpt-oss", "nearest is v_proj"]),
    ({"LORA_TARGETS": "all-linear,expert"}, CPU, ["'expert'", "nearest is experts"]),
    ({"LORA_TARGETS": "3.experts,7.mlp.experts.down_proj"}, CPU, ["only one of", "layers 7", "7.experts"]),
    ({"LORA_TARGETS": "mlp.experts.gate_up_proj,99.experts"}, CPU, ["layers 0 to 98;", "0.experts"]),
    ({"LORA_TARGETS": "q_proj,24.experts"}, CPU, ["'24.experts' matches nothing", "layers 0 to 23"]),
    ({"LORA_TARGETS": "7.experts", "LORA_DROPOUT": 0.1}, CPU, ["LORA_DROPOUT", "7.experts", "LORA_DROPOUT=0"]),
    ({"LORA_TARGETS": "experts", "ROLLOUT_SYNC": "merge"}, H100, ["ROLLOUT_SYNC", "experts", "auto", "USE_VLLM=0"]),
    (
        {"LORA_TARGETS": "experts", "LORA_R": 513, "ROLLOUT_SYNC": "lora"},
        H100,
        ["rank 512 at most", "Lower it, or set USE_VLLM=0"],
    ),
    ({"LORA_TARGETS": "7.down_proj"}, CPU, ["nearest is experts"]),
    ({"LORA_TARGETS": ","}, CPU, ["names no module"]),
    ({"WARMUP_STEPS": 100}, CPU, ["rise over 100 steps, the run has 100"]),
    ({"TEMPERATURE": 0.005}, H100, ["no colder than 0.01", "USE_VLLM=0"]),
    ({"ROLLOUT_SYNC": "lora", "LORA_R": 513}, H100, ["rank 512 at most", "ROLLOUT_SYNC=merge"]),
    ({"USE_VLLM": True}, CPU, ["needs a GPU"]),
    ({}, dataclasses.replace(H100, gpus=2), ["2 GPUs are visible", "CUDA_VISIBLE_DEVICES=0"]),
]


def settings_problems(machine, config=None, **changes):
    problems = Problems()
    config = config or ({"num_hidden_layers": 24} if "24" in changes.get("LORA_TARGETS", "") else None)
    check_settings(Settings(**changes), config, machine, problems)
    return problems


@pytest.mark.parametrize(("changes", "machine", "messages"), CONFLICTS, ids=lambda v: str(v)[:40])
def test_conflicts(changes, machine, messages):
    problem = only(settings_problems(machine, **changes))
    assert all(message in problem for message in messages), problem


def test_settings_that_go_together():
    both = "7.mlp.experts.gate_up_proj,7.mlp.experts.down_proj"  # as PEFT's target_parameters
    for targets in (
        " all-linear ",
        "q_proj, o_proj",
        "all-linear, experts",
        "7.experts",
        both,
        f"experts,{both},q_proj",
    ):
        assert not settings_problems(CPU, LORA_TARGETS=targets)
    for changes in ({"ROLLOUT_SYNC": "merge"}, {"LORA_R": 513}):
        assert not settings_problems(H100, LORA_TARGETS="experts", USE_VLLM=False, **changes)
    assert not settings_problems(H100, TEMPERATURE=2.1, USE_VLLM=False) and not settings_problems(CPU, TEMPERATURE=2.1)
    assert not settings_problems(H100, TEMPERATURE=2.0, LOSS_TYPE="vespo")
    for capability in (0.0, 9.0, 10.0):  # 0: it could not be read
        assert not settings_problems(dataclasses.replace(H100, capability=capability), ATTN_IMPL="flash_attention_4")
    assert not settings_problems(H100, REAL_CONFIG, USE_VLLM=True, EXPERTS="mxfp4")
    bf16 = REAL_CONFIG | {"quantization_config": None}
    for kind in ("mxfp4", "shared", "paged"):
        assert "has no MXFP4 experts" in only(settings_problems(CPU, bf16, EXPERTS=kind))


@pytest.mark.parametrize(
    ("capability", "vllm", "sync", "word"),
    [(9.0, True, "merge", ""), (8.9, True, "merge", "8.9"), (10.0, True, "merge", "10.0"), (9.0, True, "lora", "ROLLOUT_SYNC"), (9.0, False, "merge", "vLLM")],
)  # fmt: skip
def test_experts_are_shared_where_vllms_layout_is_known(capability, vllm, sync, word):
    problems, machine = Problems(), dataclasses.replace(H100, capability=capability)
    checks.check_shared(Settings(ROLLOUT_SYNC=sync), REAL_CONFIG, machine, vllm, problems)
    assert not problems
    checks.check_shared(Settings(EXPERTS="paged", ROLLOUT_SYNC=sync), REAL_CONFIG, machine, vllm, problems)
    assert len(problems) == (not vllm) and all("EXPERTS=auto" in one for one in problems), "on any card"
    problems.clear()
    shared = Settings(EXPERTS="shared", ROLLOUT_SYNC=sync)
    checks.check_shared(shared, REAL_CONFIG, machine, vllm, problems)
    assert len(problems) == bool(word) and all(word in one and "EXPERTS=auto" in one for one in problems)
    if not word:
        tied = REAL_CONFIG | {"tie_word_embeddings": True}
        checks.check_shared(shared, tied, machine, vllm, problems)
        assert "no output head" in only(problems)
        shapes = Shapes(tied, machine, 940, "torch_flash", "prefix", 12.9)
        assert "shared" not in shapes.expert_kinds(Settings()), "nor does auto take it"


@pytest.mark.parametrize("kind", ["shared", "paged"])
def test_a_run_without_vllm_makes_no_room_for_it(kind, tmp_path):
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path), "EXPERTS": kind}
    assert "does not generate here" in only(preflight(environ, CPU).problems)


@pytest.mark.parametrize(
    ("environ", "sync", "source"),
    [({}, "merge", "chosen"), ({"LORA_TARGETS": "experts"}, "lora", "chosen"), ({"ROLLOUT_SYNC": "lora"}, "lora", "environment")],
)  # fmt: skip
def test_what_is_chosen_is_not_called_a_default(environ, sync, source):
    resolved = preflight(CLEAN | {"MODEL_ID": "tiny"} | environ, CPU)
    assert (resolved.settings.ROLLOUT_SYNC, resolved.sources["ROLLOUT_SYNC"]) == (
        sync,
        source,
    ) and not resolved.problems


@pytest.fixture
def asked(tmp_path):
    """The tiny model's demo, of 815 training rows and 8 prompts a step."""
    return CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0"}


def test_epochs_are_resolved_to_steps_before_anything_uses_them(asked, tmp_path):
    resolved = preflight(asked | {"NUM_TRAIN_EPOCHS": "2.5"}, CPU)
    assert not resolved.problems and (resolved.settings.TOTAL_STEPS, resolved.sources["TOTAL_STEPS"]) == (255, "chosen")
    length = dict(banner.facts(resolved))["length"]
    assert length.startswith("255 steps, 2.5 epochs over the rows: NUM_TRAIN_EPOCHS=2.5 x 815 rows / 8 prompts")
    assert checks.run_records(resolved)["settings.json"]["settings"]["TOTAL_STEPS"] == 255
    resolved = preflight(asked | {"NUM_TRAIN_EPOCHS": "1", "WARMUP_STEPS": "102"}, CPU)
    assert "rise over 102 steps, the run has 102" in only(resolved.problems)
    both = preflight(asked | {"NUM_TRAIN_EPOCHS": "1", "TOTAL_STEPS": "5"}, CPU)
    assert "TOTAL_STEPS=5 is set as well. Unset one of the two" in only(both.problems)
    most = preflight(asked | {"NUM_TRAIN_EPOCHS": "1e6", "PROMPTS_PER_STEP": "1"}, CPU)
    assert not most.problems and most.settings.TOTAL_STEPS == 815_000_000
    rows = write_csv(tmp_path / "rows.csv", HEADER, [[RENDERED.format("x"), 0, 1]] * 3)
    few = preflight(asked | {"NUM_TRAIN_EPOCHS": "1", "DATA": str(rows)}, CPU)
    assert not few.problems and few.settings.TOTAL_STEPS == 1


def test_variables_that_are_no_settings_are_warned_of_once(asked):
    resolved = preflight(asked | {"STEPS": "5", "DEBUG": "1"}, CPU)
    assert (
        not resolved.problems
        and banner.banner(resolved).count("STEPS is set and is no setting: set TOTAL_STEPS=5") == 1
    )


def test_the_threads_of_a_small_model_are_told_and_recorded(asked, monkeypatch):
    for threads, words in (("", "1: more would wait"), ("3", "set by OMP_NUM_THREADS=3")):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        resolved = preflight(asked, CPU)
        assert words in dict(banner.facts(resolved))["threads"]
        chosen, reason = checks.run_records(resolved)["settings.json"]["choices"]["threads"]
        assert (
            chosen == (None if threads else 1)
            and reason in words + " for each other, so small are the operations of this model"
        )


def shapes_on(machine, checkpoint=None):
    return Shapes(REAL_CONFIG, machine, 940, "torch_flash", "prefix", checkpoint)


def memory_problems(machine, checkpoint=None, resumed=False, **changes):
    problems = Problems()
    check_memory(Settings(**changes), shapes_on(machine, checkpoint), problems, resumed)
    return problems


def test_memory():
    assert not memory_problems(H100) and not memory_problems(H100, 12.9)
    assert "no GPU is visible" in only(memory_problems(CPU)) and "MODEL_ID=tiny" in only(memory_problems(CPU))
    small = dataclasses.replace(H100, gpu="NVIDIA L4", gpu_total=22.5, gpu_free=22.0)
    problem = only(memory_problems(small))
    assert problem.startswith("GPU NVIDIA L4: 22 of 22 GiB are free, and learning in micro-batches of 1 would need 4")
    assert "weights 38.96 + adapter" in problem and "EXPERTS=mxfp4 fits" in problem
    assert "C compiler: there is none" in only(memory_problems(dataclasses.replace(H100, compiler="")))
    problem = memory_problems(H100, MAX_COMPLETION_LEN=131_072 - 939)[0]
    assert f"more than the model's 131072 positions. Set it to {131_072 - 940} or lower" in problem
    problem = only(memory_problems(dataclasses.replace(H100, gpu_free=50.0), 12.9))
    assert problem.startswith("VLLM_GPU_MEM: 50 of 80 GiB are free, and vLLM would have 0.0 GiB of cache")
    problem = only(memory_problems(dataclasses.replace(H100, ram_free=12.0), 12.9))
    assert problem.startswith("memory: the sleeping engine keeps") and "12.0 GiB are free" in problem
    assert problem.endswith("or set USE_VLLM=0")
    hopper = dataclasses.replace(H100, ram_free=12.0, capability=9.0)
    assert only(memory_problems(hopper, 12.9)).endswith("or set EXPERTS=shared"), "nothing of it goes to the host"


@pytest.mark.parametrize(
    ("capability", "free", "chosen"),
    [(9.0, 79.0, "shared"), (8.9, 79.0, "bf16"), (8.9, 40.0, "mxfp4"), (8.9, 22.0, "paged")],
)
def test_experts_are_chosen_by_the_machine(capability, free, chosen):
    machine = dataclasses.replace(H100, capability=capability, gpu_free=free)
    shapes = dataclasses.replace(shapes_on(machine), checkpoint=12.9)
    assert resolve.resolve_experts(Settings(EXPERTS=None), shapes)[0] == chosen
    lora = resolve.resolve_experts(Settings(EXPERTS=None, ROLLOUT_SYNC="lora"), shapes)[0]
    assert lora == (chosen if capability < 9 else "bf16"), "vLLM keeps experts for other kernels then"
    assert not memory_problems(machine, 12.9, EXPERTS=chosen), "it fits"


def test_the_choice_of_experts_is_told_and_recorded(tmp_path):
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0"}
    told = ({}, "the default"), ({"EXPERTS": "auto"}, "fit beside all else"), ({"EXPERTS": "bf16"}, "set by EXPERTS")
    for asked, words in told:
        resolved = preflight(environ | asked, CPU)
        source = {"": "default", "auto": "chosen"}.get(asked.get("EXPERTS", ""), "environment")
        assert not resolved.problems and (resolved.settings.EXPERTS, resolved.sources["EXPERTS"]) == ("bf16", source)
        reason = checks.run_records(resolved)["settings.json"]["choices"]["experts"][1]
        assert words in reason and dict(banner.facts(resolved))["experts"] == f"bf16: {reason}"


def test_it_says_what_evaluations_ask_for(tmp_path):
    """By hand: before, after 50 steps, after; a pass through the closed loop has 30 hours."""
    given = types.SimpleNamespace(
        settings=Settings(), eval_rows=range(10), closed_loop=SimulationPlan(runs=True, rollouts=30)
    )
    text = "3 times, and twice greedily: 140 answers to held-out rows and 150 rollouts of the closed loop, one after the other"
    assert banner.asked_text(given) == f"{text}; training: 100 rollouts of 96 completions"
    given = types.SimpleNamespace(
        settings=Settings(EVAL_STEPS=0, INIT_ADAPTER="a"), eval_rows=range(1), closed_loop=SimulationPlan()
    )
    assert banner.asked_text(given).startswith("3 times, and twice greedily: 14 answers to held-out rows; training")
    exact = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run")}
    for changes, asks in (({}, False), ({"TOP_P": "0.9"}, True), ({"EVAL_SAMPLES": "0"}, False)):
        assert ("that asks" in dict(banner.facts(preflight(exact | changes, CPU)))) is asks


def test_disk_space(tmp_path, monkeypatch):
    """What is there of a download that broke off does not have to come again."""
    settings = Settings(OUTPUT_DIR=str(tmp_path / "run"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def problems(free, files):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
        found = Problems()
        check_disk(settings, files, 0.1, found)
        return found

    full = problems(2**20, ModelFiles(None, {}))
    assert full[0].startswith(f"OUTPUT_DIR={tmp_path / 'run'}: checkpoints, logs and the zip need 0.7 GiB")
    problem = only(problems(5 * 2**30, ModelFiles(None, {})))
    assert problem.startswith(f"HF_HOME={tmp_path / 'hf'}: ") and "12.9 GiB" in problem
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert only(problems(5 * 2**30, ModelFiles(None, {}))).startswith(f"HF_HUB_CACHE={tmp_path / 'hub'}: ")
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 5 * 2**30)
    assert "7.9 GiB" in only(problems(5 * 2**30, ModelFiles(tmp_path, {})))
    os.truncate(tmp_path / "model.safetensors", 13_761_264_768)
    assert not problems(5 * 2**30, ModelFiles(tmp_path, {}))
    monkeypatch.setenv("HF_HUB_CACHE", "~nobody-here/hub")
    assert only(problems(2**40, ModelFiles(None, {}))).startswith("HF_HUB_CACHE=~nobody-here/hub: ")


def test_the_current_folder(tmp_path, monkeypatch):
    """It may be deleted, or have a name that no report can be written with."""
    assert checks.place_problem() is None
    for name in ("gone", "odd\udcff"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "gone":
            (tmp_path / name).rmdir()
        assert checks.place_problem().startswith("current folder: ")
        monkeypatch.chdir(tmp_path)


def test_odd_input_is_a_list_of_problems(tiny, tmp_path):
    """Through the real entry: no traceback, whatever the environment and a model folder hold."""
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes()[:9000])
    (tmp_path / "my_exit.py").write_text("raise SystemExit\n")
    done = run_script(
        "--check", cwd=tmp_path, MODEL_ID=tmp_path / "model", DATA=ROOT / "data/tes_train_compact.csv", EVAL_DATA="~nobody-here/x.csv",
        OUTPUT_DIR="runs/\udcff", NUM_GENERATIONS=10**18, SEED="1" * 5000, REWARDS="my_exit:score", LEARNING_RATES="\udcff",
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr and "7 problems" in done.stderr, done.stderr
    for words in ("tokenizer.json fails", "~nobody-here", "not UTF-8", "NUM_GENERATIONS", "SEED", "my_exit:score"):
        assert words in done.stderr, words


def test_check_of_a_real_size_warns_of_a_hub_kernel(tiny, tmp_path, claimed_gpu):
    """A checkpoint of the real size, without its weights, on a machine whose nvidia-smi shows an H100."""
    folder, kernel = tmp_path / "model", "kernels-community/vllm-flash-attn3"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(REAL_CONFIG))
    (folder / "model.safetensors").touch()
    (tmp_path / "site" / "kernels-0.16.2.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "kernels-0.16.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.16.2\n")
    settings = {
        "MODEL_ID": folder, "DATA": "data/tes_train_compact.csv", "EVAL_SAMPLES": 0, "USE_VLLM": 0, "ATTN_IMPL": kernel,
        "OUTPUT_DIR": tmp_path / "run", "IGNORE_VARS": "", "PYTHONPATH": tmp_path / "site", **claimed_gpu,
    }  # fmt: skip
    done = run_script("--check", **settings)
    assert done.returncode == 0 and "loss          bnpo by liger: " in done.stdout, done.stdout + done.stderr
    assert f"| ATTN_IMPL={kernel}: its gradients may be wrong" in done.stdout


def test_long_prompts_are_named(tiny, tmp_path):
    rows = [[RENDERED.format("short"), 0, 1], [RENDERED.format("long " * 300), 0, 1]]
    path = write_csv(tmp_path / "long.csv", HEADER, rows)
    environ = {"MODEL_ID": "tiny", "DATA": str(path), "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0"}
    problem = only(preflight(CLEAN | environ, CPU).problems)
    assert f"{path}, row 2: the prompt has" in problem and "MAX_PROMPT_LEN is 256" in problem
    needed = problem.split("MAX_PROMPT_LEN=")[1]
    assert not preflight(CLEAN | environ | {"MAX_PROMPT_LEN": needed}, CPU).problems
    write_csv(
        path, HEADER, [*rows, [RENDERED.format("long " * 900), 0, 1], *[[RENDERED.format("long " * 400), 0, 1]] * 9]
    )
    problem = only(preflight(CLEAN | environ, CPU).problems)
    assert f"{path}, row 3: the prompt has" in problem and "11 of 12 prompts are longer than that" in problem
    assert f"set MAX_PROMPT_LEN={problem.split(' tokens')[0].rpartition(' ')[2]}" in problem


def test_a_resumed_run_keeps_what_auto_chose(asked, tmp_path):
    choices = {"rollouts": [False, ""], "plan": {"generation_batch": 2}}
    problems, run = Problems(), RunState(tmp_path, 4, tmp_path, True, choices)
    fresh, chosen = preflight(asked, CPU), preflight(asked | {"GENERATION_BATCH": "16"}, CPU)
    plan = checks.continue_run(fresh, run, problems).plan
    assert (plan.generation_batch, plan.generation_batch_reason) == (2, "as the run was started") and not problems
    assert checks.continue_run(chosen, run, problems) == dataclasses.replace(chosen, run=run) and not problems
    choices["rollouts"] = [True, ""]
    assert checks.continue_run(fresh, run, problems).plan == fresh.plan
    assert "was started with USE_VLLM=1, now it is 0 (no GPU" in only(problems)


def test_every_choice_has_its_reason_and_what_was_set_is_not_changed(asked):
    """Settings stand in the run as they were set, but for those that say so."""
    settings, sources, problems = load_settings(asked | {"NUM_TRAIN_EPOCHS": "1", "EXPERTS": "auto"})
    before = dataclasses.replace(settings), dict(sources)
    facts = resolve.read_facts(settings, sources, CPU, Ranks(), problems)
    resolved = resolve.resolve(settings, sources, facts, problems)
    assert (settings, sources) == before and not problems
    assert all(resolved.reasons[field] for field in checks.RECORDED.values())
    changed = {name for name in FIELDS if getattr(settings, name) != getattr(resolved.settings, name)}
    assert changed == {"EXPERTS", "ROLLOUT_SYNC", "TOTAL_STEPS"}
    assert {name for name in FIELDS if resolved.sources[name] == "chosen"} == changed


def test_everything_at_once_exits_2_and_writes_nothing(tmp_path):
    bad = write_csv(tmp_path / "bad.csv", HEADER, [["x", "a", 1]])
    done = run_script(
        MODEL_ID="./nowhere", DATA=f"{bad},{tmp_path}/none.csv", LEARING_RATE=1, SEED="x", GENERATION_BATCH=7, REWARDS="actoin",
        REPORT_TO="mlflow", OUTPUT_DIR=tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 2
    named = ("LEARING_RATE", "SEED: 'x'", "GENERATION_BATCH: 7", "'actoin'", "mlflow", "./nowhere", "none.csv")
    for words in (*named, "column reward_action_0: 'a'"):
        assert words in done.stderr, words
    assert "8 problems" in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.csv"]


def test_the_real_model_without_a_gpu_is_one_clear_answer(tmp_path):
    done = run_script(OUTPUT_DIR=tmp_path / "run", IGNORE_VARS="")
    assert done.returncode == 2
    assert "no GPU is visible, and openai/gpt-oss-20b needs one" in done.stderr and "MODEL_ID=tiny" in done.stderr


def data_warnings(**environ):
    resolved = preflight(CLEAN | {"MODEL_ID": "tiny"} | {k: str(v) for k, v in environ.items()}, CPU)
    found, text = banner.data_warnings(resolved), banner.banner(resolved)
    assert all(banner_text(warning) in text for warning in found)
    return found


def test_the_plan_lists_the_settings_that_are_not_at_their_defaults(tmp_path):
    """All of them with --check. Listed is what was chosen and what the user set to something else."""
    environ = {"MODEL_ID": "tiny", "SEED": "7", "EPSILON": "0.2", "OUTPUT_DIR": str(tmp_path / "run")}
    resolved = preflight(CLEAN | environ, CPU)

    def named(**options) -> list[str]:
        settings = banner.banner(resolved, **options).partition("\nThis run\n")[0].splitlines()[1:]
        return [line.split()[0] for line in settings if line]

    assert named() == ["MODEL_ID", "SEED", "OUTPUT_DIR"] and named(every_setting=True) == list(FIELDS)


def test_columns_that_go_by_another_name_are_in_the_plan(tmp_path, monkeypatch):
    """Where a function of the user's gets them; and reward functions that fail are none to list."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plan.py").write_text(
        "def score(completions, csv_completion, prompt_id, **columns):\n    return [1.0 for _ in completions]\n"
    )
    path = write_csv(tmp_path / "d.csv", ["user", "completion", "prompt_id"], [["Go", "x", "mine"]])
    environ = {"MODEL_ID": "tiny", "DATA": str(path), "EVAL_SAMPLES": "0", "OUTPUT_DIR": str(tmp_path / "run")}
    facts = dict(banner.facts(preflight(CLEAN | environ | {"REWARDS": "my_plan:score"}, CPU)))
    assert facts["columns"].startswith("`completion` goes by `csv_completion` to reward functions")
    assert "prompt_id" not in facts["columns"]
    facts = dict(banner.facts(preflight(CLEAN | environ | {"REWARDS": "my_plan:none"}, CPU)))
    assert "columns" not in facts and facts["rewards"] == "none that can be used, see below"
    write_csv(path, ["text"], [["Go"]])
    facts = dict(banner.facts(preflight(CLEAN | environ | {"REWARDS": "my_plan:score"}, CPU)))
    assert facts["data"] == "no row that can be used, see below" and "held out" not in facts
    assert "epochs" not in facts["length"]


def test_a_run_is_warned_of_flat_rows(tiny, tmp_path):
    rows = [["first", 0, 1], ["second", 1, 1], ["third", 0.5, 0.5], ["fourth", 1, 0]]
    half, more = (write_csv(tmp_path / f"{n}.csv", ["user", *HEADER[1:]], rows[:n]) for n in (4, 3))
    output = {"OUTPUT_DIR": tmp_path / "run", "EVAL_SAMPLES": 0}
    assert not data_warnings(DATA=half, **output)
    assert only(data_warnings(DATA=more, **output)) == (
        f"2 of 3 rows pay all their actions the same and teach nothing; the first is {more}, row 2"
    )
    assert not data_warnings(DATA=more, REWARDS="format", **output)


def test_a_run_is_warned_of_prompts_with_other_rewards(tiny, tmp_path):
    rows = [["first", 0, 1], ["second", 1, 0], ["first", 1, 0], ["second", 1, 0]]
    output = {"OUTPUT_DIR": tmp_path / "run", "EVAL_SAMPLES": 0}
    data = write_csv(tmp_path / "d.csv", ["user", *HEADER[1:]], rows)
    warning = only(data_warnings(DATA=data, **output))
    assert warning == "1 of 2 prompts stand in several rows with other rewards: the model learns their mean"
    assert not data_warnings(DATA=write_csv(tmp_path / "e.csv", ["user", *HEADER[1:]], rows[1::2]), **output), "alike"


def test_a_run_is_warned_where_nothing_can_be_held_out(tiny, tmp_path, good_csv):
    output = {"OUTPUT_DIR": tmp_path / "run"}
    assert not data_warnings(DATA="data/tes_train_compact.csv", **output), "the demo's own rows"
    warning = only(data_warnings(DATA=good_csv, **output))
    assert "Nothing is measured" in warning and "DATA has 12 prompts, and it takes 20" in warning
    assert "EVAL_DATA='...'" in warning and "EVAL_SAMPLES=0" in warning
    assert not data_warnings(DATA=good_csv, EVAL_SAMPLES=0, **output)
    assert not data_warnings(DATA=good_csv, EVAL_SHARE=0, **output)
    assert not data_warnings(DATA=good_csv, EVAL_DATA="data/tes_heldout_compact.csv", **output)


def test_the_plan_says_which_rows_are_held_out_and_names_no_plant_where_there_is_none(tiny, tmp_path):
    rows = [["x" * n, n / 50, 1 - n / 50] for n in range(1, 41)]
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run")}
    own = environ | {"DATA": str(write_csv(tmp_path / "d.csv", ["question", *HEADER[1:]], rows))}
    resolved = preflight(own, CPU)
    facts = dict(banner.facts(resolved))
    assert not resolved.problems and (len(resolved.rows), len(resolved.eval_rows)) == (34, 6)
    assert facts["data"] == "34 training rows, 6 held-out rows"
    assert facts["held out"].startswith("6 rows of DATA do not train: 6 of its 40 prompts")
    assert resolved.best_by == "reward" and "closed loop" not in facts
    assert "plant" not in banner.banner(resolved)
    assert checks.run_records(resolved)["settings.json"]["choices"]["heldout"] == [6, facts["held out"]]
    none = dict(banner.facts(preflight(own | {"EVAL_SAMPLES": "0"}, CPU)))
    assert none["data"] == "40 training rows, 0 held-out rows" and none["evaluation"] == "none: EVAL_SAMPLES=0"


def test_rows_of_the_plant_need_a_profile_for_the_closed_loop(tiny, tmp_path):
    """With the user's own rows one line says how to switch it on; the demo's rows come with its days."""
    own, profile = tmp_path / "own.csv", "data/profile_heldout.csv"
    shutil.copy(ROOT / "data/tes_heldout_compact.csv", own)
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run")}
    resolved = preflight(environ | {"EVAL_DATA": str(own)}, CPU)
    assert not resolved.closed_loop.runs and resolved.best_by == "reward"
    assert dict(banner.facts(resolved))["closed loop"].startswith("off: set EVAL_PROFILE to the hourly profile")
    assert preflight(environ | {"EVAL_DATA": str(own), "EVAL_PROFILE": profile}, CPU).best_by == "plant"
    assert f" windows of {profile}, " in banner.banner(preflight(environ, CPU))


def test_a_run_that_held_out_other_rows_is_not_silently_changed(tiny, tmp_path):
    """One that an earlier version began, with all rows of DATA and the demo's held-out ones, and changed settings."""
    data = write_csv(
        tmp_path / "d.csv", ["question", *HEADER[1:]], [["x" * n, n / 50, 1 - n / 50] for n in range(1, 41)]
    )
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "DATA": str(data)}
    asked = {"EVAL_DATA": "data/tes_heldout_compact.csv", "EVAL_PROFILE": "data/profile_heldout.csv"}
    record = checks.run_records(preflight(environ | asked, CPU))["settings.json"]
    del record["settings"]["EVAL_SHARE"], record["choices"]["heldout"]  # as earlier versions wrote it
    (tmp_path / "run").mkdir()
    write_sealed(tmp_path / "run/settings.json", record)
    problem = only(preflight(environ, CPU).problems)
    assert "started on other rows" in problem and "EVAL_DATA=data/tes_heldout_compact.csv as at its start" in problem
    assert not preflight(environ | asked, CPU).problems
    write_sealed(
        tmp_path / "run/settings.json",
        checks.run_records(preflight(environ | {"OUTPUT_DIR": "x"}, CPU))["settings.json"],
    )
    assert not preflight(environ, CPU).problems, "the same rows are held out again"
    assert "with EVAL_SAMPLES=8 as at its start" in only(preflight(environ | {"EVAL_SAMPLES": "0"}, CPU).problems)
    assert "with EVAL_DATA=auto as at its start" in only(preflight(environ | asked, CPU).problems)
    share = preflight(environ | {"EVAL_SHARE": "0.4"}, CPU).problems
    assert any("EVAL_SHARE=0.1 to continue it" in one for one in share)


def test_a_run_is_warned_of_held_out_prompts_that_are_trained_on(tiny, tmp_path, good_csv):
    rows = [[RENDERED.format(text), 0, 1] for text in ("question 3", "question 3", "question 7", "another")]
    other = write_csv(tmp_path / "other.csv", HEADER, rows)
    warning = only(data_warnings(DATA=good_csv, EVAL_DATA=other, OUTPUT_DIR=tmp_path / "run"))
    assert warning.startswith("2 of 3 held-out prompts are in DATA as well")


def test_the_plan_says_how_long_it_takes_only_where_that_is_known(tiny, tmp_path):
    resolved = preflight(CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path), "TOTAL_STEPS": "10"}, CPU)
    assert dict(banner.facts(resolved))["time"].startswith("time left not known before step 3")
    (tmp_path / "metrics.csv").write_text("step,step_s,eval_s\n" + "".join(f"{step},600,\n" for step in range(1, 5)))
    assert "not known" in dict(banner.facts(resolved))["time"], "a run that begins anew"
    resumed = dataclasses.replace(resolved, run=RunState(tmp_path, 4, tmp_path, True))
    assert dict(banner.facts(resumed))["time"].startswith("about 1 h 0 min left, until ")


PENALTY = "def score(completions, **columns):\n    return [-9.0 if '[' in text else 0.0 for text in completions]\n"


def test_the_real_check_refuses_garbage_that_pays_and_boxes_what_was_set(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(PENALTY)
    path = write_csv(
        tmp_path / "d.csv", [*HEADER, "q_action_0", "q_action_1"], [["x", 0.5, 0.5, 0, 0], ["y", 0, 1, -1, 0]]
    )
    given = {"MODEL_ID": "tiny", "DATA": path, "EVAL_SAMPLES": 0, "OUTPUT_DIR": tmp_path / "run"}
    done = run_script("--check", cwd=tmp_path, **given, REWARDS="regret,mine:score")
    assert done.returncode == 2 and "one problem" in done.stderr
    # Two answers of regret 0, one of 20: a tenth below ln 21, or 0.1 below 0, and no penalty for either.
    worst, garbage = -9 - math.log(21) / 2, -(0.1 + 1.1 * math.log(21)) / 2
    assert f"REWARDS: an unreadable answer earns {garbage:.3g} on average" in done.stderr
    assert f"a row's worst action {worst:.3g}, so a run would learn garbage. Let mine:score return less" in done.stderr
    done = run_script("--check", cwd=tmp_path, **given, REWARDS="action,mine:score", INVALID_REWARD=0)
    assert done.returncode == 0, done.stderr
    assert "\n| INVALID_REWARD=0: an unreadable answer earns 0 on average (action 0, mine:score 0)" in done.stdout
    done = run_script("--check", cwd=tmp_path, **given)
    assert done.returncode == 0 and "| INVALID" not in done.stdout
    assert "rewards       regret x 1: every training row has q_action_k" in done.stdout
    assert "scaled by     batch: regret" in done.stdout


def test_settings_json_holds_the_chosen_rewards(tiny, tmp_path, good_csv):
    environ = {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0", "REWARDS": "auto"}
    for data, name, scale in ((good_csv, "action", "group"), ("data/tes_train_compact.csv", "regret", "batch")):
        resolved = preflight(CLEAN | environ | {"DATA": str(data)}, CPU)
        assert not resolved.problems and resolved.reward_specs == [(name, 1.0)]
        chosen = checks.run_records(resolved)["settings.json"]["choices"]
        assert chosen["rewards"][0] == name and chosen["scale_rewards"][0] == scale
    problem = only(preflight(CLEAN | environ | {"DATA": str(good_csv), "REWARDS": "shortfall"}, CPU).problems)
    assert problem.startswith(f"{good_csv}, columns: `shortfall` needs q_action_0")
