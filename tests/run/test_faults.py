# SPDX-License-Identifier: Apache-2.0
"""Runs that fail, or are ended while they evaluate, or learn nothing; what they say of it and what they leave."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import signal
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run_script
from peft import PeftModel
from runs import SETTINGS, environment
from safetensors import SafetensorError

import train_grpo
from grpo.evaluate import heldout
from grpo.evaluate.plant import measure_closed_loop
from grpo.preflight.choices import ClosedLoop
from grpo.run.archive import model_card
from grpo.run.folder import COMPLETE, full_disk
from grpo.run.logs import CsvLog, reward_warning, start_logging
from grpo.settings import Settings, load_settings
from grpo.settings import log as run_log


@pytest.fixture
def run_here(monkeypatch, tmp_path, tiny, quiet):
    """A run in this process: (exit code, training.log)."""

    def run_once(**settings: object) -> tuple[int, str]:
        for name, value in environment(tmp_path / "run", **settings).items():
            monkeypatch.setenv(name, value)
        quiet()  # of an earlier run
        return train_grpo.main([]), (tmp_path / "run" / "training.log").read_text(encoding="utf-8")

    return run_once


def test_ctrl_c_in_the_evaluation_before_training_ends_it_there(run_here, monkeypatch):
    """Nothing is lost by it, and the evaluation may be long."""
    asked = []

    def evaluate(*arguments, **options):
        asked.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("the signal did not end it")

    monkeypatch.setattr("grpo.evaluate.heldout.evaluate", evaluate)
    code, log = run_here(EVAL_SAMPLES=1, RESUME="never")
    assert code == 130 and asked == [1] and "finishing this step" not in log and "step 1/" not in log
    assert "stopped at once; the same command WITHOUT RESUME=never starts at step 0: no checkpoint was saved" in log


def test_ctrl_c_in_the_evaluation_after_training_leaves_the_zip(run_here, monkeypatch, tmp_path):
    real = heldout.evaluate

    def evaluate(trainer, rows, samples, base=False):
        if base:
            return real(trainer, rows, samples, base)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise AssertionError("the signal did not end it")

    monkeypatch.setattr("grpo.evaluate.heldout.evaluate", evaluate)
    code, log = run_here(EVAL_SAMPLES=1, TOTAL_STEPS=2)
    assert code == 143 and "interrupted at step 2; the same command continues from step 2" in log
    assert (tmp_path / "run.zip").exists() and not (tmp_path / "run" / COMPLETE).exists()


@pytest.mark.parametrize("moment", ["optimizer", "adapter", "metrics", "zip"])
def test_a_full_disk_is_named(run_here, monkeypatch, tmp_path, moment):
    """At step 4, with a checkpoint at 2: what torch, safetensors and the system raise, and what the same command does."""
    folder = tmp_path / "run"

    def failing(real, error):
        def call(*arguments, **options):
            if (folder / "checkpoint-2" / "trainer_state.json").exists():
                raise error
            return real(*arguments, **options)

        return call

    full = OSError(errno.ENOSPC, "No space left on device")
    torchs = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
    rusts = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with monkeypatch.context() as patch:
        if moment == "optimizer":
            patch.setattr(torch, "save", failing(torch.save, torchs))
            patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=1 << 40, used=1, free=0 if place == str(folder) else 1 << 40))  # fmt: skip
        elif moment == "adapter":
            patch.setattr(PeftModel, "save_pretrained", failing(PeftModel.save_pretrained, rusts))
        elif moment == "metrics":
            patch.setattr(CsvLog, "write", failing(CsvLog.write, full))
        else:
            patch.setattr(zipfile.ZipFile, "write", failing(zipfile.ZipFile.write, full))
        # SAVE_STEPS=2, so that the last step is the second checkpoint.
        code, log = run_here(TOTAL_STEPS=4)
    saved = 4 if moment == "zip" else 2
    words = f"no space left on the disk of OUTPUT_DIR={folder}: free some, the same command continues from step {saved}"
    assert code == 1 and log.rstrip().endswith(words) and "Traceback" not in log, log
    assert not list(tmp_path.glob("*.zip*"))
    done = run_script(**SETTINGS | {"OUTPUT_DIR": folder, "TOTAL_STEPS": 4})
    assert done.returncode == 0 and f"continuing from step {saved}" in done.stdout, done.stdout + done.stderr


def test_which_errors_are_a_full_disk(monkeypatch, tmp_path):
    def usage(**free):
        places = {str(tmp_path): free.get("ours", 1 << 40), tempfile.gettempdir(): free.get("temporary", 1 << 40)}  # fmt: skip
        monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=places.get(str(place), 1 << 40)))

    written = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
    full, ours = OSError(errno.ENOSPC, "x"), f"OUTPUT_DIR={tmp_path}"
    usage(ours=0)
    assert full_disk(written, tmp_path) == ours and full_disk(full, tmp_path) == ours
    assert full_disk(ValueError("a mistake, and the disk is full"), tmp_path) is None
    usage(temporary=0)
    assert full_disk(written, tmp_path) is None, "not where checkpoints are written"
    assert full_disk(full, tmp_path) == tempfile.gettempdir()
    usage()
    assert full_disk(OSError(errno.EDQUOT, "x"), tmp_path) == ours
    assert full_disk(OSError(errno.ENOENT, "x"), tmp_path) is None
    wrapped = RuntimeError("REWARDS: mine raised")
    wrapped.__cause__ = full
    assert full_disk(wrapped, tmp_path) == ours


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_training_log_prints_no_traceback(tmp_path, capfd, quiet):
    (tmp_path / "training.log").symlink_to("/dev/full")
    start_logging(tmp_path)
    run_log.info("one line")
    out, err = capfd.readouterr()
    assert out.endswith("one line\n") and "Logging error" not in err


def test_any_other_error_ends_with_what_the_same_command_does(run_here, monkeypatch, tmp_path):
    (tmp_path / "late.py").write_text(
        "from pathlib import Path\n"
        "def score(completions, *, prompts, **columns):\n"
        f"    if Path({str(tmp_path / 'run' / 'checkpoint-2' / 'trainer_state.json')!r}).exists():\n"
        "        raise ValueError('late')\n"
        "    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, log = run_here(REWARDS="action,late:score", OVERWRITE=1)
    assert code == 1 and "Traceback" in log and "REWARDS: late:score raised ValueError: late" in log
    assert log.rstrip().endswith("when its cause is fixed, the same command WITHOUT OVERWRITE=1 continues from step 2")
    assert not (tmp_path / "run" / "README.md").exists(), "a model card comes with an adapter"


def test_reward_warnings():
    warn = reward_warning
    equal, fine = (0.5, 1.0), (0.5, 0.9)
    assert warn([]) is None and warn([equal] * 4) is None, "too early to say"
    for words in ("nothing is learned", "TEMPERATURE", "NUM_GENERATIONS", "completions.csv"):
        assert words in warn([fine] * 3 + [equal] * 5)
    assert warn([equal] * 9 + [fine]) is None and warn([equal] * 4 + [fine] + [equal] * 4) is None
    assert "the reward is nan" in warn([fine, (math.nan, 0.0)]) and "INVALID_REWARD" in warn([(math.nan, math.nan)])
    assert warn([(math.nan, 0.0), fine]) is None


def test_a_run_that_learns_nothing_says_so(run_here, monkeypatch, tmp_path):
    """Both, again after WARN_EVERY steps, and in a resumed run that has the earlier steps from metrics.csv."""
    (tmp_path / "flat.py").write_text("def score(completions, **columns):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, log = run_here(REWARDS="flat:score", TOTAL_STEPS=4)
    assert code == 0 and "nothing is learned" not in log
    code, log = run_here(REWARDS="flat:score", TOTAL_STEPS=16)
    assert code == 0 and log.count("nothing is learned") == 2 and log.count("continuing from step 4") == 1
    before = log.split("nothing is learned")[0]
    assert "step 5/16" in before and "step 6/16" not in before


def test_a_nan_reward_is_said(run_here, monkeypatch, tmp_path):
    (tmp_path / "none.py").write_text(
        "def score(completions, **columns):\n    return [1.0 if len(completions) == 1 else None] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, log = run_here(REWARDS="none:score", TOTAL_STEPS=2)
    assert code == 0 and log.count("the reward is nan") == 1


def test_the_model_card(run_here, monkeypatch, tmp_path, tiny):
    """In the run and in its checkpoints: no path of this machine, and the code in it loads the adapter."""
    assert run_here(TOTAL_STEPS=2)[0] == 0
    cards = [(tmp_path / "run" / name / "README.md").read_text(encoding="utf-8") for name in ("", "checkpoint-2")]
    assert cards[0] == cards[1] and "for tiny, trained for 2 steps with GRPO" in cards[0]
    assert "base_model" not in cards[0] and "None" not in cards[0] and str(tiny.parent) not in cards[0]
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert archive.read("run/README.md").decode() == cards[0]
    code = cards[0].split("```python\n")[1].split("```")[0].replace('"tiny"', repr(str(tiny)))
    monkeypatch.chdir(tmp_path / "run")
    found: dict = {}
    exec(code.replace(', device_map="auto"', ""), found)
    assert found["model"].peft_config["default"].r == load_settings({"MODEL_ID": "tiny"})[0].LORA_R
    assert all(p.abs().sum() > 0 for name, p in found["model"].named_parameters() if "lora_" in name)


def test_the_model_card_names_a_hub_model_and_a_folder(tmp_path):
    card = model_card(Settings(), 7)
    header = card.split("---\n")[1]
    assert "base_model: openai/gpt-oss-20b\n" in header and "library_name: peft\n" in header
    assert 'from_pretrained("openai/gpt-oss-20b"' in card and "trained for 7 steps" in card
    (tmp_path / "mine").mkdir()
    card = model_card(Settings(MODEL_ID=str(tmp_path / "mine")), 7)
    assert str(tmp_path) not in card and 'from_pretrained("mine"' in card and "base_model:" not in card


def test_regret_of_the_closed_loop_is_named_as_the_page_defines_it(monkeypatch, tmp_path, caplog):
    record = {"totals": {"base": {"regret_percent": 12.34}}}
    monkeypatch.setattr("grpo.evaluate.plant.new_record", lambda *arguments: record)
    monkeypatch.setattr("grpo.evaluate.plant.write_record", lambda record, path: path.write_text(json.dumps(record)))
    trainer = SimpleNamespace(run=SimpleNamespace(settings=Settings(), folder=tmp_path))
    with caplog.at_level(logging.INFO, "train_grpo"):
        measure_closed_loop(trainer, ClosedLoop("full", "", ("p.csv",), ()), "", base=True)
    assert "regret 12.3 % of the optimum's priced CO2" in caplog.text


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    done = run_script(**SETTINGS | {"OUTPUT_DIR": tmp_path / "run", "MODEL_ID": "tiny", "XDG_CACHE_HOME": "/dev/null"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "MODEL_ID=tiny: the tiny model cannot be made" in done.stderr and "XDG_CACHE_HOME=" in done.stderr
    assert not (tmp_path / "run").exists()
