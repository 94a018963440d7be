# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR.zip: what is in it, and what never is."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile

import pytest

from grpo.common import ROOT
from grpo.output.archive import model_card, write_zip
from grpo.output.durable import write_text
from grpo.settings.table import Settings


@pytest.fixture
def folder(tmp_path):
    """A run's folder."""
    folder = tmp_path / "ü & run"
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"settings": {"OUTPUT_DIR": str(folder)}}))
    (folder / "metrics.csv").write_text("step\n1\n")
    return folder


def unzipped(folder, contents="all"):
    with zipfile.ZipFile(write_zip(folder, contents)) as file:
        assert file.testzip() is None
        return {name.removeprefix(folder.name + "/"): file.read(name) for name in file.namelist()}


def test_nothing_from_outside_and_no_pickle_is_taken(folder, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("private")
    (folder / "key").symlink_to(tmp_path / "secret" / "key")
    (folder / "secret").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "half.tmp"):
        (folder / "checkpoint-2" / name).write_bytes(pickle.dumps(name))
    (folder / "checkpoint-2" / "adapter_model.safetensors").write_text("weights")
    for name in ("best.tmp", "adapter.tmp"):  # An error or a second Ctrl-C came while an adapter was written.
        (folder / name).mkdir()
        (folder / name / "adapter_model.safetensors").write_text("weig")
    for name in ("metrics.csv", "settings.json"):
        os.utime(folder / name, (0, 0))  # A zip knows no date before 1980.
    inside = unzipped(folder)
    assert set(inside) == {"settings.json", "metrics.csv", "checkpoint-2/adapter_model.safetensors"}
    assert not any(b"private" in content for content in inside.values())


ADAPTERS = {f"{place}{name}" for place in ("", "best/") for name in ("adapter_model.safetensors", "README.md")}


@pytest.mark.parametrize(("contents", "expected"), [
    ("adapter", ADAPTERS | {"settings.json"}),
    ("no_completions", ADAPTERS | {"settings.json", "metrics.csv", "tokenizer.json", "checkpoint-2/README.md"}),
])  # fmt: skip
def test_a_slow_line_carries_less(folder, contents, expected):
    """What is left out stays in OUTPUT_DIR."""
    (folder / "best").mkdir()
    for name in [*ADAPTERS, "completions.csv", "tokenizer.json", "checkpoint-2/README.md"]:
        (folder / name).write_text("x")
    assert set(unzipped(folder)) == expected | {"completions.csv", *unzipped(folder, "no_completions")}, "all"
    assert set(unzipped(folder, contents)) == expected and (folder / "completions.csv").exists()


def test_no_path_of_the_machine_is_in_it(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    alike = f"{folder}2 /x{ROOT}/y https://host{ROOT}/z /models/mine"
    log = f"Adapter: {folder}, download: {folder}.zip\n"
    log += f"{ROOT}/grpo/x.py {sys.prefix}/lib/y.py {tmp_path}/home/z\n{alike} b"
    (folder / "training.log").write_bytes(log.encode() + b"\xff")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{ROOT}/data/tiny"}))
    inside = unzipped(folder)
    name = folder.name
    assert inside["settings.json"] == (folder / "settings.json").read_bytes()
    assert json.loads(inside["adapter_config.json"])["base_model_name_or_path"] == "./data/tiny"
    text = f"Adapter: {name}, download: {name}.zip\n./grpo/x.py python/lib/y.py ~/z\n{alike} b"
    assert inside["training.log"] == text.encode() + b"\xff", "and no other byte is another"


def test_a_planted_link_is_not_written_through(folder, tmp_path):
    (tmp_path / "precious").write_text("mine")
    archive = folder.with_name(folder.name + ".zip")
    for path in (archive.with_name(archive.name + ".tmp"), archive, folder / "a.json.tmp"):
        path.symlink_to(tmp_path / "precious")
    write_zip(folder)
    write_text(folder / "a.json", "{}")
    assert (tmp_path / "precious").read_text() == "mine" and (folder / "a.json").read_text() == "{}"
    assert zipfile.is_zipfile(archive)


def test_the_model_card_names_a_hub_model_and_a_folder(tmp_path):
    def card(adapter="run", functions="action x 1", **settings):
        return model_card(Settings(**settings), 7, functions, adapter=tmp_path / adapter if adapter else None)

    assert "base_model: openai/gpt-oss-20b\n" in card().split("---\n")[1] and "trained for 7 steps" in card()
    assert 'from_pretrained("openai/gpt-oss-20b"' in card() and "Mxfp4Config" not in card()
    assert "Mxfp4Config(dequantize=True))" in card(functions="", LORA_TARGETS="q_proj,7.experts")
    direct = card(DIRECT_ANSWERS=True)
    assert "completions each" not in direct and "max_new_tokens=1)" in direct
    assert ') + "<|channel|>final<|message|>["\n' in direct
    assert f'from_pretrained(model, "{tmp_path}/run/best")' in card("run/best") and "from any folder" in card()
    assert '{"role": "system", "content": "Say \\"no\\""}' in card(SYSTEM_PROMPT='Say "no"')
    assert '{"role": "user", "content": "Answer this:\\nYour question"}' in card(PROMPT_TEMPLATE="Answer this:\n{}")
    (tmp_path / "mine").mkdir()
    local = {"MODEL_ID": str(tmp_path / "mine")}
    assert f'from_pretrained("{tmp_path}/mine"' in card(**local) and "base_model:" not in card(**local)
    saved = card(adapter="", **local)
    assert str(tmp_path) not in saved and 'from_pretrained("mine"' in saved and 'from_pretrained(model, ".")' in saved
    assert "from the folder of this file and with the path of the base model's folder (" in saved
