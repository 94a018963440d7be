# SPDX-License-Identifier: Apache-2.0
"""scripts/export.py --push, to a Hub on this machine. Run: python -m pytest tests/evaluate/test_publish.py"""

import json
import shutil

import httpx
import pytest
from export import main
from hub_server import STRANGER, TOKEN
from run_folders import metrics_row, write_run
from safetensors.torch import load

from grpo.output.layout import ADAPTER


@pytest.fixture
def run(hub, saved_adapter, tmp_path, monkeypatch):
    """The folder of a run with an adapter, its best/, figures, and a path of this machine in a setting."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = tmp_path / "cooling"
    shutil.copytree(saved_adapter, folder)
    shutil.copytree(saved_adapter, folder / "best")
    settings = {"MODEL_ID": "tiny", "DATA": f"{tmp_path}/mine.csv", "LORA_R": 3, "SYSTEM_PROMPT": "a|b\nc"}
    sources = dict.fromkeys(settings, "environment") | {"LORA_R": "default"}
    evaluation = {"before": {"reward": 0.25}, "after": {"reward": 0.5}}
    files = {"settings": {"settings": settings, "sources": sources}, "best/best": {"in_words": "step 5 is the best"}}
    return write_run(folder, [metrics_row(7)], evaluation=evaluation, **files)


def test_an_adapter_with_its_card(run, hub, tmp_path, capsys):
    assert main([str(run), "--push", "me/cooling"]) == 0
    assert capsys.readouterr().out == f"uploaded: {hub.url}/me/cooling\n"
    repo = hub.repos["models", "me/cooling"]
    assert repo.private and {ADAPTER, "adapter_config.json", "tokenizer.json", "README.md"} <= set(repo.files)
    assert repo.files[ADAPTER] == (run / ADAPTER).read_bytes()
    assert not [name for name, content in repo.files.items() if str(tmp_path).encode() in content]
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == "data/tiny"
    card = repo.files["README.md"].decode()
    assert "library_name: peft" in card and 'PeftModel.from_pretrained(model, "me/cooling")' in card
    assert "| Training data | mine.csv |" in card and "| `SYSTEM_PROMPT` | a\\|b c |" in card and "`LORA_R`" not in card
    assert "The last step's adapter changed held-out reward by +0.250" in card and "| trained | 0.500 |" in card
    config = json.loads((run / "best" / "adapter_config.json").read_text())
    (run / "best" / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": ["experts.down_proj"]}))
    assert main([str(run / "best"), "--push", "me/cooling"]) == 0
    best = hub.repos["models", "me/cooling"].files["README.md"].decode()
    assert "\nStep 5 is the best.\n" in best and "dequantize=True" in best and "dequantize" not in card


def test_a_damaged_record_is_named(run, hub, capsys):
    (run / "adapter_config.json").write_text("{")
    assert main([str(run), "--push", "me/cooling"]) == 2 and not hub.repos
    assert ": adapter_config.json cannot be read (" in capsys.readouterr().err


def test_a_merged_model(run, hub, tmp_path):
    arguments = [str(run), "--out", str(tmp_path / "out"), "--push", "me/merged"]
    assert main(arguments) == 0
    files = hub.repos["models", "me/merged"].files
    card = files["README.md"].decode()
    assert set(load(files["model.safetensors"])) and "library_name: transformers" in card
    assert 'AutoModelForCausalLM.from_pretrained("me/merged"' in card and "vllm serve me/merged --max-model-len" in card


def test_a_whole_model_goes_with_its_tokenizer(hub, tmp_path, monkeypatch, capsys):
    """As verl's merger writes it. A dry run needs no account and uploads nothing."""
    model = tmp_path / "ppo-merged"
    model.mkdir()
    files = {"config.json": b"{}", "model-1.safetensors": b"weights", "tokenizer.json": b"{}"}
    for name, content in files.items():
        (model / name).write_bytes(content)
    assert main([str(model), "--push", "team/llama", "--dry-run"]) == 2
    assert f"{model}: the model has no tokenizer" in capsys.readouterr().err
    files["tokenizer_config.json"] = b"{}"
    (model / "tokenizer_config.json").write_bytes(b"{}")
    assert main([str(model), "--push", "me/llama", "--dry-run"]) == 0 and not hub.repos
    assert "4 files, 0.00 GB, for me/llama: config.json, model-1.safetensors, tok" in capsys.readouterr().out
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([str(model), "--push", "me/llama"]) == 0
    repo = hub.repos["models", "me/llama"]
    assert repo.private and {name: repo.files[name] for name in files} == files
    (model / ADAPTER).touch()
    assert main([str(model), "--push", "me/llama", "--dry-run"]) == 2
    assert "--dry-run is for a folder with a whole model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "repo", "code", "message"),
    [
        (TOKEN, "me/two words", 2, "--push me/two words: "),
        ("hf_wrong", "me/x", 2, "Invalid user token"),
        (STRANGER, "me/x", 1, "no write access"),
    ],
)
def test_what_the_hub_refuses(run, hub, tmp_path, capsys, monkeypatch, token, repo, code, message):
    """Before the export where that can be known; what was written stays."""
    monkeypatch.setenv("HF_TOKEN", token)
    assert main([str(run), "--out", str(tmp_path / "out"), "--push", repo]) == code
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "out").exists() == (code == 1)


def test_a_line_that_breaks_during_the_upload(run, hub, monkeypatch, capsys):
    def break_off(*_, **options):
        raise httpx.ReadError("the line broke")

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", break_off)
    assert main([str(run), "--push", "me/cooling"]) == 1
    assert "export failed: ReadError: the line broke" in capsys.readouterr().err
