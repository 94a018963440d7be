# SPDX-License-Identifier: Apache-2.0
"""Models and cards that are refused or warned of before anything is downloaded."""

import dataclasses
import functools
import json
import shutil

import pytest
from helpers import ROOT
from hub_server import files_in
from machines import CPU, H100, only, plan_inputs, resolved_run

from grpo.common import Problems
from grpo.evaluate.saved_adapter import check_model, commit_of_run, load_run_settings
from grpo.output.folder import prepare_run
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.memory import plan_memory
from grpo.preflight import checks
from grpo.preflight.banner import banner
from grpo.settings.table import Settings

BF16 = {name: value for name, value in REAL_CONFIG.items() if name != "quantization_config"}


@pytest.fixture
def changed_model(tiny, tmp_path):
    """Makes a folder with the tiny model whose config.json has other values."""

    def change(**fields):
        folder = shutil.copytree(tiny, tmp_path / "model", dirs_exist_ok=True)
        config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return change


@pytest.fixture
def run(tmp_path):
    """Resolves a run on rows that are short enough for every model."""
    data = ROOT / "data" / "tes_train_compact.csv"
    return functools.partial(resolved_run, tmp_path / "run", EVAL_SAMPLES=0, EXPERTS="bf16", DATA=data)


def model_problems(resolved):
    """Its problems without that of vLLM's package, which tests do not have."""
    return [problem for problem in resolved.problems if not problem.startswith("packages: ")]


def test_another_model_in_vllm_is_refused(run, changed_model):
    """Only where vLLM generates."""
    folder = changed_model(rms_norm_eps=1e-6, layer_types=["full_attention"] * 3)
    epsilon, layers = model_problems(run(H100, MODEL_ID=folder, USE_VLLM=1))
    start = f"MODEL_ID={folder}: config.json: "
    assert epsilon.startswith(f"{start}rms_norm_eps is 1e-06 instead of 1e-05") and "Set USE_VLLM=0" in epsilon
    assert layers.startswith(f"{start}by layer_types layer 0 and 2 more is another kind than in vLLM")
    assert not run(H100, MODEL_ID=folder, USE_VLLM=0).problems and not run(CPU, MODEL_ID=folder).problems


def test_the_window_is_compared_with_the_longest_sequence(run, changed_model):
    longest = run(H100, USE_VLLM=1).plan.prompt_len + 10
    for window, problems in ((longest, 0), (longest - 1, 1)):
        folder = changed_model(layer_types=["full_attention"] * 3, sliding_window=window)
        assert len(model_problems(run(H100, MODEL_ID=folder, USE_VLLM=1, MAX_COMPLETION_LEN=10))) == problems


@pytest.mark.parametrize("window", [0, None])
def test_transformers_does_not_generate_without_a_window(run, changed_model, window):
    """It would end in the first rollout, even where no layer is a sliding one. vLLM takes both for no window."""
    for kind in ("full_attention", "sliding_attention"):
        folder = changed_model(sliding_window=window, layer_types=[kind] * 3)
        assert f"config.json: sliding_window is {window}, and transformers" in only(run(MODEL_ID=folder).problems)
    assert not model_problems(run(H100, MODEL_ID=folder, USE_VLLM=1))


def test_a_model_that_nothing_computes_is_refused_everywhere(run, changed_model):
    folder = changed_model(swiglu_limit=5.0)
    problem = only(run(MODEL_ID=folder).problems)
    assert problem.startswith(f"MODEL_ID={folder}: config.json: swiglu_limit is 5.0 instead of 7.0, which neither")


COPY_OF_120B = BF16 | {"num_hidden_layers": 36, "num_local_experts": 128}


@pytest.mark.parametrize(
    ("config", "free", "original"),
    [
        (BF16, 79.0, "openai/gpt-oss-20b"),  # Two BF16 models, the trainer's and vLLM's, have no room on an H100.
        (BF16, 40.0, "openai/gpt-oss-20b"),
        (BF16, 10.0, None),  # Neither fits.
        (REAL_CONFIG, 10.0, None),
        (COPY_OF_120B, 79.0, "openai/gpt-oss-120b"),
        (BF16 | {"num_hidden_layers": 22}, 40.0, None),  # It has the shape of neither.
    ],
)
def test_the_original_of_a_bf16_copy_is_the_remedy(config, free, original):
    machine = dataclasses.replace(H100, capability=9.0, gpu_free=free)
    inputs = dataclasses.replace(plan_inputs(machine, True), config=config)
    kind = "shared" if "quantization_config" in config else "bf16"
    settings = Settings(EXPERTS=kind, ROLLOUT_SYNC="merge", MAX_COMPLETION_LEN=512)
    checks.check_memory(settings, inputs, plan_memory(settings, inputs), problems := Problems())
    (problem,) = [text for text in problems if text.startswith(("GPU", "VLLM_GPU_MEM"))]
    words = f"If this is a BF16 copy of it, set MODEL_ID={original} and EXPERTS=auto: its MXFP4 experts fit."
    assert words in problem if original else "BF16 copy" not in problem


def test_host_memory_that_the_original_does_not_need_names_it_too():
    machine = dataclasses.replace(H100, capability=9.0, gpu_total=139.0, gpu_free=139.0, ram_free=12.0)
    inputs = dataclasses.replace(plan_inputs(machine, True), config=BF16)
    settings = Settings(EXPERTS="bf16", ROLLOUT_SYNC="merge")
    checks.check_memory(settings, inputs, plan_memory(settings, inputs), problems := Problems())
    words = "or set MODEL_ID=openai/gpt-oss-20b and EXPERTS=auto if this is a BF16 copy of it"
    assert only(problems).endswith(words)
    settings = Settings(EXPERTS="paged", ROLLOUT_SYNC="merge")  # Refused for this model, whose remedies have no mxfp4.
    checks.check_memory(settings, inputs, plan_memory(settings, inputs), problems := Problems())
    assert "EXPERTS=mxfp4" not in problems[0]


def test_a_run_continues_with_the_commit_of_the_hub_that_it_began_with(hub, run, tiny, tmp_path, saved_adapter):
    """And its adapter is asked on that commit."""
    name, files = "org/model", files_in(tiny)
    hub.add(name, files)
    commit = hub.repos["models", name].commit
    begun = run(MODEL_ID=name)
    assert not begun.problems and f"commit {commit} of {name}: the newest" in banner(begun)
    prepare_run(begun.state, begun.settings, checks.run_records(begun))
    hub.add(name, files | {"README.md": b"a line was added"})
    continued = run(MODEL_ID=name)
    assert not continued.problems and f"commit {commit} of {name}: with which the run began" in banner(continued)
    assert checks.run_records(continued)["settings.json"]["choices"]["model_commit"] == commit
    for path in saved_adapter.iterdir():
        shutil.copyfile(path, tmp_path / "run" / path.name)
    assert commit_of_run(tmp_path / "run", name) == commit_of_run(tmp_path / "run" / "best", name) == commit
    settings, problems = load_run_settings(tmp_path / "run")
    assert check_model(settings, tmp_path / "run", CPU, problems).commit == commit and not problems
    assert commit_of_run(tmp_path / "run", "org/other") is None and commit_of_run(None, name) is None
    assert run(MODEL_ID=name, OVERWRITE=1).files.commit == hub.repos["models", name].commit != commit


@pytest.mark.parametrize(("capability", "warned"), [(8.0, False), (9.0, False), (10.0, True), (12.0, True)])
def test_blackwell_is_warned_of(run, capability, warned):
    machine = dataclasses.replace(H100, gpu="NVIDIA B200", capability=capability)
    with_vllm, without = (banner(run(machine, USE_VLLM=vllm)) for vllm in (1, 0))
    for text in (with_vllm, without):
        assert ("NVIDIA B200 has compute capability 1" in text) == warned
    assert ("NVIDIA-NeMo/RL/issues/1774" in with_vllm) == warned and "issues/1774" not in without


def test_an_amd_gpu_is_named_where_a_gpu_is_missing(run):
    amd = dataclasses.replace(CPU, has_amd=True)
    text = "\n".join(run(amd, MODEL_ID="openai/gpt-oss-20b", MAX_PROMPT_LEN=2048).problems)
    assert "the GPU here is AMD's, which is not supported, and no NVIDIA one is visible, and openai/gpt-oss-20b" in text
    assert "or try MODEL_ID=tiny" in text and "no GPU is visible" not in text
    resolved = run(amd)
    assert not resolved.problems and "no GPU that can be used (AMD's are not supported)" in banner(resolved)
