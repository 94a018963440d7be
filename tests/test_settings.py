# SPDX-License-Identifier: Apache-2.0
"""Settings: parsing, limits, near misses, help."""

import ast
import dataclasses
import math
import re
from pathlib import Path

import hypothesis
import pytest
from helpers import ROOT, run_python, run_script
from hypothesis import strategies as st
from machines import only

from grpo.common import Problems
from grpo.plan.targets import check_targets
from grpo.settings.environment import load_settings, unknown_variables
from grpo.settings.foreign import ADVICE, COMMON_WORDS, OTHER_VALUES, SYNONYMS, TRL_ONLY, TRL_REASONS, UNSUPPORTED
from grpo.settings.hints import flag_answers, nearest_setting
from grpo.settings.parsing import parse_value, show
from grpo.settings.table import FIELDS, Settings

ACCEPTED = [
    ("TOTAL_STEPS", " 7 ", 7, "spaces around"),
    ("OVERWRITE", "OFF", False, "a word for false, upper case"),
    ("LOSS_TYPE", "BNPO", "bnpo", "choices ignore case"),
    ("INVALID_REWARD", "nan", math.nan, "nan is allowed here"),
    ("MODEL_ID", "~/models/mine", str(Path.home() / "models/mine"), "a shell leaves `~` in quotes as it is"),
    ("INIT_ADAPTER", "~/runs/mine/best", str(Path.home() / "runs/mine/best"), "the same of every path"),
    ("PROMPT_DATE", "20240229", "2024-02-29", "a leap day, normalized: the same day is the same prompt"),
]
REFUSED = {  # reason -> (setting, text, message)
    "nan": ("LEARNING_RATE", "nan", "finite"),
    "exclusive limit": ("LEARNING_RATE", "0", "above 0"),
    "not a boolean": ("OVERWRITE", "2", "1 or 0"),
    "a group of one compares nothing": ("NUM_GENERATIONS", "1", "at least 2"),
    "no probability": ("TOP_P", "1.01", "at most 1"),
    "transposed": ("LOSS_TYPE", "bpno", "the nearest is bnpo"),
    "auto beside a boolean": ("USE_VLLM", "perhaps", "expected auto, 1 or 0"),
    "400 digits": ("TOTAL_STEPS", "1" * 400, "at most 1000000000"),
    "digits of another script": ("SEED", "\uff11", "expected a whole number"),
    "an underscore": ("LEARNING_RATE", "0.0_1", "expected a number"),
    "no float32": ("PARITY_LIMIT", "1e38", r"at most 1e\+30"),
    "no date": ("PROMPT_DATE", "2025/11/6", "expected a day such as 2025-11-06"),
    "bytes that are no text": ("DATA", "days\udcff.csv", "not UTF-8"),
    "nobody's home": ("OUTPUT_DIR", "~nobody-here/runs", "home"),
    "a long name": ("MODEL_ID", "x" * 256, "name too long"),
}


@pytest.mark.parametrize(("name", "text", "value", "reason"), ACCEPTED, ids=lambda v: str(v))
def test_accepted(name, text, value, reason):
    parsed = parse_value(name, text)
    assert type(parsed) is type(value), reason
    assert parsed == value or (math.isnan(parsed) and math.isnan(value)), reason


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    """In one line; the default stays, so that checks go on."""
    name, text, message = REFUSED[reason]
    with pytest.raises(ValueError, match=message):
        parse_value(name, text)
    settings, _, problems = load_settings({name: text})
    assert only(problems).startswith(f"{name}: ") and settings == Settings()


def test_a_refused_number_has_its_unit():
    """40GB, or 40 for a share, is a guess at the unit."""
    assert "expected a number or auto (unit: GiB). Unset" in only(load_settings({"GPU_MEM_LIMIT": "40GB"})[2])
    assert "must be at most 0.95 (unit: share). Unset" in only(load_settings({"VLLM_GPU_MEM": "40"})[2])
    assert "unit" not in only(load_settings({"PROMPT_DATE": "6.11.2025"})[2])


NUMBERS = st.from_regex(r"[-+]?[0-9._eE\u0661-\u0669\uff10-\uff19]{1,30}", fullmatch=True)
ANY_TEXT = st.text(st.characters(exclude_characters="\0")) | NUMBERS


@hypothesis.given(st.sampled_from(sorted(FIELDS)), ANY_TEXT)
def test_any_text_is_a_value_or_one_line(name, text):
    settings, _, problems = load_settings({name: text})
    assert len(problems) <= 1 and all(len(problem.splitlines()) == 1 for problem in problems)
    assert settings.completions_per_step <= 10**10
    value = getattr(settings, name)
    assert not isinstance(value, (int, float)) or math.isnan(value) or abs(value) <= 1e30


NEAR = [
    ("LEARING_RATE", "LEARNING_RATE"), ("learning_rate", "LEARNING_RATE"), ("LEARNINGRATE", "LEARNING_RATE"),
    ("ATTN_IMLP", "ATTN_IMPL"), ("LEARNIN_RAET", "LEARNING_RATE"), ("packing_", "PACKING"), ("SEEDS", "SEED"),
]  # fmt: skip
STRANGERS = ["PATH", "SPEED", "DATE_FORMAT", "DATABASE", "VLLM_USE_V1", "HF_HOME", "WANDB_PROJECT", "META", "MODEL_DIR"]
# Of platforms that run jobs, in every one of them or by a hyperparameter of this name.
STRANGERS += [
    "SM_OUTPUT_DIR", "SM_OUTPUT_DATA_DIR", "SM_HP_NUM_GENERATIONS", "SM_HP_GRADIENT_CHECKPOINTING", "PBS_ENVIRONMENT",
    "VH_OUTPUTS_DIR", "PAI_HPS_GRADIENT_CHECKPOINTING", "AZUREML_MODEL_DIR", "KAGGLE_DATA_PROXY_URL", "RUNPOD_POD_ID",
    "SLURM_NTASKS", "AIP_MODEL_DIR",
]  # fmt: skip


def test_near_misses_name_the_setting_and_other_programs_variables_are_left_alone():
    for variable, setting in NEAR:
        assert nearest_setting(variable) == setting
        assert f"nearest is {setting}" in only(load_settings({variable: "1"})[2])
        assert not load_settings({variable: "1", "IGNORE_VARS": variable})[2]
    assert unknown_variables(dict.fromkeys(STRANGERS, "1")) == ([], [])


ERRORS = [  # variable, value, the remedy
    ("num-epochs", "3", "Set NUM_TRAIN_EPOCHS=3"),
    ("WARMUP_RATIO", "0.1", "Set WARMUP_STEPS to 0.1 x TOTAL_STEPS"),
    ("DATASET", "days.csv", "Set DATA=days.csv; or"),
    ("LR", "0", "Set LEARNING_RATE (must be above 0); or"),
    ("VLLM_GPU_MEMORY_UTILIZATION", "0.99", "Set VLLM_GPU_MEM (must be at most 0.95), or leave it out"),
    ("EPOCHS", "", "Set NUM_TRAIN_EPOCHS (a value is missing); or"),
    ("TARGET_MODULES", "up_proj,lm_head", "Set LORA_TARGETS (all-linear, q_proj,"),
    ("RESUME", "never", "was removed, the same command always continues the run, and OVERWRITE=1"),
]


@pytest.mark.parametrize(("variable", "value", "words"), ERRORS)
def test_variables_of_other_trainers_are_errors_with_the_remedy(variable, value, words):
    problem = only(load_settings({variable: value})[2])
    assert problem.startswith(f"{variable}: no such setting. ") and words in problem
    assert f"or IGNORE_VARS={variable} if it belongs" in problem and not unknown_variables({variable: value})[1]
    assert not load_settings({variable: value, "IGNORE_VARS": variable})[2]


def test_words_that_any_program_may_export_are_no_errors():
    for variable in sorted(COMMON_WORDS):
        problems, warnings = unknown_variables({variable: "3"})
        assert not problems and only(warnings).startswith(f"{variable} is set but is not a setting: ")
        assert unknown_variables({variable: "3", "IGNORE_VARS": variable}) == ([], [])
    assert "set TOTAL_STEPS=3; or IGNORE_VARS=STEPS" in only(unknown_variables({"STEPS": "3"})[1])
    assert "set OUTPUT_DIR='runs/my run'; or" in only(unknown_variables({"OUT": "runs/my run"})[1])
    assert only(unknown_variables({"OUT": "days\udcff"})[1]).isascii(), "no log can hold it as it is"


def test_every_argument_of_trl_is_a_setting_or_has_an_answer():
    """Of the installed TRL's GRPOConfig, with all that it inherits, ModelConfig and ScriptArguments."""
    trl = pytest.importorskip("trl")
    classes = (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
    names = {field.name.upper() for kind in classes for field in dataclasses.fields(kind)} - set(FIELDS)
    silent = [name for name in names if unknown_variables({name: "1"}) == ([], [])]
    assert len(names) > 180 and not silent
    assert TRL_REASONS.keys() <= names, "a name that TRL does not have is no argument of TRL's"


def test_trls_arguments_without_a_setting_are_one_warning():
    environ = {"VLLM_MODE": "server", "TORCH_COMPILE": "1", "TORCH_COMPILE_MODE": "default", "DEBUG": " "}
    problems, warnings = unknown_variables(environ)
    assert not problems and only(warnings) == (
        "TRL's argument, no setting here: TORCH_COMPILE, TORCH_COMPILE_MODE (kernels, packing and memory are this "
        "program's own (docs/memory.md)); VLLM_MODE (vLLM runs inside this program and sleeps while the model "
        "learns). IGNORE_VARS=TORCH_COMPILE,TORCH_COMPILE_MODE,VLLM_MODE for those of another program"
    )
    assert unknown_variables(environ | {"IGNORE_VARS": ",".join(environ)}) == ([], [])
    done = run_script("--check", MODEL_ID="tiny", TOP_ENTROPY_QUANTILE="0.2", OUTPUT_DIR="runs/none")
    assert "TRL's argument, no setting here: TOP_ENTROPY_QUANTILE (the loss is" in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_default_survives_being_written_out_and_read_back(name):
    for value in (FIELDS[name].default, FIELDS[name].metadata["tiny"]):
        if value is not None or FIELDS[name].type.endswith("None"):
            assert parse_value(name, show(value)) == value


@pytest.mark.parametrize("text", ["-1234567.8", "-1509.798", "0.000123456789", "1e-7", "nan", "1e12"])
def test_a_number_of_many_digits_is_shown_whole(text):
    """evaluate.py takes an adapter's settings from their text, and run.env starts the same run again."""
    assert str(parse_value("INVALID_REWARD", show(float(text)))) == str(float(text))
    assert show(0.9) == "0.9" and show(4.0) == "4" and show(True) == "1"


def test_help_names_every_setting_and_that_of_every_script_fits_the_screen():
    """In 100 columns, but for commands. argparse knows the width of its own part from COLUMNS."""
    code = """
import pathlib, runpy, sys
sys.path.insert(0, "scripts")
for path in ["train_grpo.py", *sorted(map(str, pathlib.Path("scripts").rglob("[!_]*.py")))]:
    if "__main__" not in pathlib.Path(path).read_text() or path.endswith("make_docs.py"): continue
    sys.argv = [path, "--help"]
    try: runpy.run_path(path, run_name="__main__")
    except SystemExit as end: assert not end.code, path
"""
    done = run_python("-c", code, COLUMNS=100)
    assert done.stdout.count("usage: ") >= 9
    assert not [line for line in done.stdout.splitlines() if len(line) > 100 and not line.startswith("    python ")]
    words = " ".join(done.stdout.split())
    for name, spec in FIELDS.items():
        assert f"  {name}={show(spec.default) or '(empty)'}" in done.stdout and spec.metadata["text"] in words
    for line in ("PACKING=auto   [one of auto, prefix, none]", "USE_VLLM=auto   [auto, 0 or 1]"):
        assert f"  {line}\n" in done.stdout


def test_an_older_python_is_told_in_one_line():
    """Its version is all that is pretended; what such a Python compiles is in the grammar of 3.8."""
    for path in ("train_grpo.py", "grpo/__init__.py"):
        ast.parse((ROOT / path).read_text(encoding="utf-8"), feature_version=(3, 8))
    code = "import sys; sys.version_info = (3, 8, 18, 'final', 0); import train_grpo"
    (line,) = run_python("-c", code, code=2).stderr.splitlines()
    assert line.startswith("needs Python 3.11 or newer, and ") and "is 3.8.18: see" in line


ANSWERED = [
    ("--resume-from-checkpoint latest", "leave it out: the same command continues"),
    ("--num_generations=8", "set NUM_GENERATIONS=8"),
    ("--invalid-penalty -0.5", "set INVALID_REWARD=-0.5"),
    ("--mask-truncated-completions", "set MASK_TRUNCATED=1"),
    ("--no-mask-truncated-completions", "set MASK_TRUNCATED=0"),
    ("--no-use-vllm", "set USE_VLLM=0"),
    ("--vllm-mode server", "TRL's argument, no setting here: vLLM runs inside"),
    ("--quantization 4bit", "set EXPERTS=mxfp4 (the checkpoint's own 4 bits)"),
    ("--quantization none", "set EXPERTS=bf16 (dequantized once)"),
    ("--compute-dtype bfloat16", "leave it out: it computes in BF16 on a GPU"),
    ("--attn-implementation sdpa", "set ATTN_IMPL=auto (sdpa knows no attention sinks)"),
    ("--attn-implementation flash_attention_2", "set ATTN_IMPL=flash_attention_2"),
    ("--peft-target-parameters 7.mlp.experts.gate_up_proj", "set LORA_TARGETS=all-linear,7.experts"),
    ("--peft-target-parameters", "set LORA_TARGETS (a value is missing)"),
    ("--loss-type gspo", "set IMPORTANCE_SAMPLING_LEVEL=sequence (GSPO is that"),
    ("--seed", "set SEED (a value is missing)"),
    ("--warmup-ratio", "set WARMUP_STEPS to ... x TOTAL_STEPS"),
    ("--lora-target-modules q_proj v_proj", "set LORA_TARGETS=q_proj,v_proj"),
    ("--lives 9", "no such setting"),
    ("SEED=5", "before `python`"),
]


@pytest.mark.parametrize(("typed", "answer"), ANSWERED)
def test_flags_of_other_trainers_are_answered_with_the_setting(typed, answer):
    (line,) = flag_answers(typed.split())
    assert line.startswith(f"{typed.replace('=8', ' 8')}: ") and answer in line


TARGETS = [  # PEFT's names, ours
    ("7.mlp.experts.gate_up_proj 7.mlp.experts.down_proj", "7.experts"),
    ("model.layers.11.mlp.experts.down_proj", "11.experts"),
    ("mlp.experts.gate_up_proj,q_proj", "experts,q_proj"),
    ("down_proj self_attn.k_proj", "experts,k_proj"),
    ("all-linear", "all-linear"),
    ("model.layers.3.self_attn.q_proj", ""),  # Not of single layers.
    ("router", ""),
]


@pytest.mark.parametrize(("typed", "ours"), TARGETS)
def test_peft_s_names_of_targets_become_those_that_are_accepted(typed, ours):
    (line,) = flag_answers(["--target-modules", *typed.split()])
    assert line.endswith(f"set LORA_TARGETS={ours}" if ours else "or 7.experts (of layer 7))")
    check_targets(ours or "all-linear", None, problems := Problems())
    assert not problems


def test_values_of_other_trainers_are_answered_with_what_is_accepted():
    for (name, value), (assignment, reason) in OTHER_VALUES.items():
        problem = only(load_settings({name: value.upper()})[2])
        assert f"{value.upper()!r} is not accepted, set {assignment} ({reason})" in problem and "nearest" not in problem
        assert not load_settings(dict([assignment.split("=")]))[2]


def test_every_answer_to_a_flag_names_settings_and_values_that_are_accepted():
    tables = (SYNONYMS, ADVICE, UNSUPPORTED, TRL_ONLY)
    names = [name for table in tables for group in table.values() for name in group.split()]
    assert len(names) == len(set(names)) and not set(names) & set(FIELDS)
    assert set(SYNONYMS) <= set(FIELDS) and set(names) >= COMMON_WORDS
    for line in (*ADVICE, *UNSUPPORTED, *TRL_ONLY):
        for setting, value in re.findall(r"\b([A-Z_]{4,})(?:=([\w.]+))?", line):
            assert setting in FIELDS and not (value and load_settings({setting: value})[2]), line
    done = run_script("TOTAL_STEPS=5", "--check", "--quantization", "4bit", code=2)
    assert not done.stdout and "usage: [NAME=VALUE ...] python train_grpo.py" in done.stderr
    assert "unrecognized arguments: TOTAL_STEPS=5" in done.stderr
    assert "\n  --quantization 4bit: set EXPERTS=mxfp4" in done.stderr


# A script of the first users on Hugging Face's stack, as their instructions start it.
THEIR_COMMAND = """--output-dir outputs_hf --metrics-csv metrics_hf.csv --generations-csv generations_hf.csv
    --max-seq-length 5000 --num-generations 4 --per-device-train-batch-size 1 --gradient-accumulation-steps 8
    --learning-rate 5e-5 --quantization 4bit --compute-dtype bf16 --attn-implementation flash_attention_2
    --device-map auto --peft-target-parameters 7.mlp.experts.gate_up_proj,7.mlp.experts.down_proj --torch-compile
    --resume-from-checkpoint latest"""


def test_what_the_first_users_typed_is_answered_part_by_part():
    """What the answers set is accepted together, and every part has an answer."""
    lines = flag_answers(THEIR_COMMAND.split())
    assert len(lines) == 15 and not [line for line in lines if "no such setting" in line]
    environ = dict(re.findall(r": set ([A-Z_]+)=([\w.,-]+)", "\n".join(lines)))
    settings, _, problems = load_settings(environ)
    assert not problems and (settings.EXPERTS, settings.LORA_TARGETS) == ("mxfp4", "all-linear,7.experts")
    assert len(environ) == 6


def test_a_terminal_that_cannot_show_a_setting_escapes_it(tmp_path):
    options = {"MODEL_ID": "tiny", "SYSTEM_PROMPT": "ü", "OUTPUT_DIR": tmp_path / "run"}
    assert "\\xfc" in run_script("--check", **options, PYTHONIOENCODING="ascii").stdout
