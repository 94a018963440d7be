# SPDX-License-Identifier: Apache-2.0
"""scripts/export.py: merged models that transformers loads by itself, and what it refuses. Run: python -m pytest
tests/evaluate/test_export.py"""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from export import main, parse_args
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from grpo.evaluate.export import export
from grpo.evaluate.model_card import model_readme
from grpo.model.write_checkpoint import expected_tensors, write_tensors
from grpo.output.durable import read_json
from grpo.output.layout import ADAPTER
from grpo.plan.targets import LINEAR_MODULES, expected_shapes
from grpo.plan.tensors import WEIGHTS_INDEX
from grpo.settings.environment import load_settings
from grpo.settings.table import Settings

RANK, SCALE = 4, 1.5


@pytest.fixture(scope="module")
def base(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in several shards and an index, as the real one comes."""
    folder = tmp_path_factory.mktemp("base") / "sharded"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(tiny / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.model.write_checkpoint.SHARD_BYTES", 30_000)
        write_tensors(folder, expected_tensors(read_json(tiny / "config.json")), lambda name, like: tensors[name])
    assert len(list(folder.glob("*.safetensors"))) > 5
    return folder


def write_lora(folder: Path, base: Path, size: float) -> Path:
    """A random adapter on all of the attention, whose update is of that size."""
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(read_json(base / "config.json"), RANK, "all-linear")
    folder.mkdir()
    save_file({name: size**0.5 * torch.randn(of, generator=generator) for name, of in shapes.items()}, folder / ADAPTER)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": list(LINEAR_MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(tmp_path_factory.mktemp("adapter") / "lora", base, 0.02)


def load(folder: Path):
    """Stock transformers' model in float32, with MXFP4 experts dequantized."""
    is_packed = read_json(folder / "config.json").get("quantization_config")
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).float().eval()


def count_merged(base: Path, merged: Path, policy: PeftModel) -> int:
    """The number of weights that differ from the base's. Each is what PEFT merges in float32, rounded once to the
    nearest BF16."""
    before, held, changed = load(base).state_dict(), load(merged).state_dict(), 0
    for name, value in policy.merge_and_unload().state_dict().items():
        is_changed = not torch.equal(value, before[name])
        # Float32 loses a little where base and update cancel.
        limit = 1.001 * 2**-8 * value.abs() + 1e-7 if is_changed else 0
        assert ((held[name] - value).abs() <= limit).all(), name
        changed += is_changed
    return changed


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module", params=["mxfp4", "bf16"])
def exported(request, base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("out") / "merged"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.model.write_checkpoint.SHARD_BYTES", 30_000)
        assert main([str(adapter), "--to", request.param, "--out", str(out)]) == 0
    return request.param, out


@pytest.mark.numeric
def test_weights_are_those_of_base_and_adapter(base, adapter, exported):
    policy = PeftModel.from_pretrained(load(base), str(adapter))
    assert count_merged(base, exported[1], policy) == 12


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("modules", "parameters"),
    [
        (["q_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ([], ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]),
    ],
)
def test_experts_merge_as_peft_merges_them(modules, parameters, base, tmp_path):
    lora = LoraConfig(r=3, lora_alpha=4, target_modules=modules, target_parameters=parameters)
    policy = get_peft_model(load(base), lora).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    policy.save_pretrained(tmp_path / "lora")
    assert main([str(tmp_path / "lora"), "--model", str(base), "--to", "bf16", "--out", str(tmp_path / "out")]) == 0
    assert count_merged(base, tmp_path / "out", policy) == (9 if modules else 2)
    assert "merged into it, in BF16" in (tmp_path / "out" / "README.md").read_text()


def test_a_weight_file_that_the_index_does_not_name_is_left_behind(base, adapter, exported, tmp_path):
    """One of an earlier download: transformers would load a `model.safetensors` in place of the shards."""
    form, out = exported
    mine = shutil.copytree(base, tmp_path / "base")
    first = {name: torch.zeros_like(tensor) for name, tensor in stored(base).items()}
    save_file(first, mine / "model.safetensors", {"format": "pt"})
    arguments = [str(adapter), "--model", str(mine), "--to", form, "--out", str(tmp_path / "merged")]
    assert main(arguments) == 0
    again, before = stored(tmp_path / "merged"), stored(out)
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in again)


def test_files_beside_the_tensors_stay_as_they_are(base, exported):
    form, out = exported
    same = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"]
    same += ["config.json", "model.safetensors.index.json"] if form == "mxfp4" else []
    for name in same:
        assert (out / name).read_bytes() == (base / name).read_bytes()
    left_out = {"quantization_config"} if form == "bf16" else set()
    config = read_json(base / "config.json")
    assert read_json(out / "config.json") == {name: config[name] for name in config.keys() - left_out}
    assert all(path.stat().st_mode & 0o044 for path in out.iterdir()), "others may read it"
    assert "with a LoRA adapter merged into it" in (out / "README.md").read_text()


def test_the_share_that_survives(base, tmp_path, capsys):
    """Of an update so small that most of it rounds away; against the projection written out."""
    adapter, out = write_lora(tmp_path / "small", base, 2e-5), tmp_path / "merged"
    share = export(argparse.Namespace(adapter=adapter, to="mxfp4", out=out, model=None, push=None))
    before, after, factors = stored(base), stored(out), load_file(adapter / ADAPTER)
    shared = whole = 0.0
    for name in (name for name in factors if ".lora_A." in name):
        place = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        update = SCALE * factors[name.replace("lora_A", "lora_B")] @ factors[name]
        shared += (update * (after[place].float() - before[place].float())).sum().item()
        whole += (update * update).sum().item()
    assert share == pytest.approx(shared / whole, rel=1e-4) and 0.05 < share < 0.9
    said = {0.0: "the adapter is zero", 1.0: "all of the adapter's update is in it", 2e-5: "the rest"}
    for size, words in said.items():
        write_lora(tmp_path / f"{size}", base, size)
        assert main([str(tmp_path / f"{size}"), "--out", str(tmp_path / f"merged-{size}")]) == 0
        printed = capsys.readouterr().out
        assert words in printed and "100.0%" not in printed


def edit(folder: Path, name: str, tensor: torch.Tensor) -> None:
    save_file(load_file(folder / ADAPTER) | {name: tensor}, folder / ADAPTER)


def dequantize(model: Path) -> None:
    """Makes a checkpoint's small files those of a BF16 one."""
    config, index = read_json(model / "config.json"), read_json(model / WEIGHTS_INDEX)
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    shards = {n.removesuffix("_scales"): part for n, part in index["weight_map"].items() if not n.endswith("_blocks")}
    (model / WEIGHTS_INDEX).write_text(json.dumps(index | {"weight_map": shards}))


FIRST, EXPERT = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "x.mlp.experts.lora_A.weight"
BAD = {
    "other shapes": (lambda a, b: edit(a, FIRST, torch.zeros(4, 7)), "expected [4, 64]"),
    "experts": (lambda a, b: edit(a, EXPERT, torch.zeros(4, 7)), f"attention ({EXPERT}"),
    "not finite": (lambda a, b: edit(a, FIRST, torch.full((4, 64), torch.nan)), "holds NaN or infinity"),
    "a shard is missing": (lambda a, b: next(b.glob("*.safetensors")).unlink(), "Copy the whole checkpoint"),
    "a damaged base": (lambda a, b: next(b.glob("*.safetensors")).write_bytes(b"no"), "no safetensors file"),
    "not quantized": (lambda a, b: dequantize(b), "Use --to bf16"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_one_line(fault, base, adapter, tmp_path, capsys):
    change, message = BAD[fault]
    mine, model = (shutil.copytree(path, tmp_path / "in" / path.name) for path in (adapter, base))
    change(mine, model)
    before = sorted(tmp_path.rglob("*"))
    assert main([str(mine), "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed and len(printed.splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_target_is_written_whole_or_not_at_all(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.evaluate.export.model_readme", lambda *_: int("ours"))  # the last of what is written
    with pytest.raises(ValueError, match="ours"):  # A fault of this program is not told as one of the input.
        main([str(adapter), "--out", str(tmp_path / "out")])
    monkeypatch.setattr("grpo.preflight.adapter.expected_shapes", lambda *_: int("ours"))  # the first of what is read
    with pytest.raises(ValueError, match="ours"):
        main([str(adapter), "--out", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def test_what_it_is_to_do_is_said():
    with pytest.raises(SystemExit, match="2"):
        parse_args(["run"])


def test_the_card_of_a_merged_model_asks_it_as_its_run_did(tmp_path):
    """The folder has no record of the run: without these settings it was asked at another effort, in other words."""
    mine = Settings(SYSTEM_PROMPT="It's a plant.\nServe it.", REASONING_EFFORT="low", DIRECT_ANSWERS=True)
    (line,) = re.findall(
        r"^(SYSTEM_PROMPT=.*?python) scripts/ask", model_readme(mine, tmp_path, "m", "bf16"), re.M | re.S
    )
    variables = dict(word.split("=", 1) for word in shlex.split(line)[:-1])
    read, _, problems = load_settings(variables)
    assert not problems and read == mine
    assert "\npython scripts/ask.py --model m " in model_readme(Settings(), tmp_path, "m", "bf16")
