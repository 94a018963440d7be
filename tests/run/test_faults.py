# SPDX-License-Identifier: Apache-2.0
"""Runs that fail, learn nothing, or are asked to end; what they say of it and what they leave."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPT, run_script
from runs import ASKED, SETTINGS, assert_same_run, environment, finish, go_on, has_line, start_held, wait_until
from safetensors import SafetensorError

import train_grpo
from grpo.evaluate.heldout import HeldoutEvaluation
from grpo.run import ending
from grpo.run.archive import model_card
from grpo.run.folder import COMPLETE, full_disk, last_checkpoint
from grpo.run.logs import start_logging
from grpo.run.signals import SIGNALS, StopRequest
from grpo.settings import Settings
from grpo.settings import log as run_log


@pytest.fixture
def run_here(monkeypatch, tmp_path, tiny, quiet):
    """A run in this process: (exit code, training.log)."""

    def run_once(**settings: object) -> tuple[int, str]:
        for name, value in environment(tmp_path / "run", **settings).items():
            monkeypatch.setenv(name, value)
        quiet()  # of an earlier run
        code, folder = train_grpo.main([]), Path(os.environ["OUTPUT_DIR"])
        return code, (folder / "training.log").read_text(encoding="utf-8")

    return run_once


@pytest.fixture
def user_module(monkeypatch, tmp_path):
    """A module `mine` whose reward function `score` has this body."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return lambda body: (tmp_path / "mine.py").write_text(f"def score(completions, **columns):\n    {body}\n")


@pytest.mark.parametrize("during", ["before", "after"])
def test_a_signal_in_an_evaluation_ends_it_at_once(run_here, monkeypatch, tmp_path, during):
    """It may be long. Before training nothing is lost by it; after it the zip is still made."""
    real = HeldoutEvaluation.measure

    def measure(self, base=False, greedy=False):
        if base and during == "after":
            return real(self, base, greedy)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise AssertionError("the signal did not end it")

    monkeypatch.setattr(HeldoutEvaluation, "measure", measure)
    code, log = run_here(EVAL_SAMPLES=1, TOTAL_STEPS=2, OVERWRITE=1)
    again = "the same command WITHOUT OVERWRITE=1"
    assert code == 143 and "finishing this step" not in log
    if during == "before":
        assert f"stopped at once; {again} starts at step 0: no checkpoint was saved" in log and "step 1/" not in log
    else:
        assert f"interrupted at step 2; {again} continues from step 2" in log
        assert (tmp_path / "run.zip").exists() and not (tmp_path / "run" / COMPLETE).exists()


@pytest.mark.parametrize("moment", ["optimizer", "zip"])
def test_a_full_disk_is_named(run_here, monkeypatch, tmp_path, moment):
    """At step 4, with a checkpoint at 2: what torch and the system raise, and what the same command does."""
    folder = tmp_path / "run"

    def failing(real, error):
        def call(*arguments, **options):
            if (folder / "checkpoint-2" / "trainer_state.json").exists():
                raise error
            return real(*arguments, **options)

        return call

    full = OSError(errno.ENOSPC, "No space left on device")
    torchs = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=1 << 40, used=1, free=0 if place == str(folder) else 1 << 40))  # fmt: skip
        if moment == "optimizer":
            patch.setattr(torch, "save", failing(torch.save, torchs))
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
    streamed = RuntimeError("basic_ios::clear: iostream error")
    full, ours = OSError(errno.ENOSPC, "x"), f"OUTPUT_DIR={tmp_path}"
    usage(ours=0)
    assert [full_disk(one, tmp_path) for one in (written, streamed, full)] == [ours] * 3
    assert full_disk(ValueError("a mistake, and the disk is full"), tmp_path) is None
    usage(temporary=0)
    assert full_disk(written, tmp_path) is None, "not where checkpoints are written"
    assert full_disk(full, tmp_path) == tempfile.gettempdir()
    usage()
    assert full_disk(OSError(errno.EDQUOT, "x"), tmp_path) == ours
    assert full_disk(OSError(errno.ENOENT, "x"), tmp_path) is None
    rusts = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    room = f"{ours} (it has room: see `df -i` for its inodes, or a quota is met)"
    assert full_disk(rusts, tmp_path) == room
    wrapped = RuntimeError("REWARDS: mine raised")
    wrapped.__cause__ = full
    assert full_disk(wrapped, tmp_path) == room
    for table, inodes in ((100, True), (0, False)):  # btrfs has no table of inodes, and says 0 of 0
        monkeypatch.setattr(os, "statvfs", lambda place, table=table: SimpleNamespace(f_files=table, f_favail=0))
        assert full_disk(full, tmp_path) == (
            f"{ours} (no inodes left: delete files, however small)" if inodes else room
        )
        assert (full_disk(written, tmp_path) is not None) is inodes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_training_log_prints_no_traceback(tmp_path, capfd, quiet):
    (tmp_path / "training.log").symlink_to("/dev/full")
    start_logging(tmp_path)
    run_log.info("one line")
    out, err = capfd.readouterr()
    assert out.endswith("one line\n") and "Logging error" not in err


def test_out_of_memory_names_the_next_smaller_micro_batch(run_here, monkeypatch, tmp_path):
    def no_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr("train_grpo.train", no_memory)
    code, log = run_here(MICRO_BATCH=6)
    assert code == 1 and "out of memory: CUDA out of memory. Tried" in log and "MICRO_BATCH=3" in log
    assert (tmp_path / "run.zip").exists()


def test_any_other_error_ends_with_what_the_same_command_does(run_here, user_module, tmp_path):
    saved = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    user_module(f"return [1 / (not __import__('pathlib').Path({str(saved)!r}).exists()) for _ in completions]")
    code, log = run_here(REWARDS="action,mine:score", OVERWRITE=1)
    assert code == 1 and "Traceback" in log and "REWARDS: mine:score raised ZeroDivisionError" in log
    assert log.rstrip().endswith("when its cause is fixed, the same command WITHOUT OVERWRITE=1 continues from step 2")
    assert not (tmp_path / "run" / "README.md").exists(), "a model card comes with an adapter"


def test_a_reward_function_that_fails_loses_no_finished_step(run_here, user_module, tmp_path, capfd):
    """At step 4, with a checkpoint at 2: one of step 3 is saved, and the run that goes on is the uninterrupted one."""
    fixed = tmp_path / "fixed"
    failing = f"columns['trainer_state'].global_step == 3 and not __import__('pathlib').Path({str(fixed)!r}).exists()"
    user_module(f"return [1 / (not ({failing})) * len(one) for one in completions]")
    settings = {"REWARDS": "action,mine:score=0.01", "TOTAL_STEPS": 5}
    code, log = run_here(**settings)
    shown = capfd.readouterr().out
    raised = f"REWARDS: mine:score raised ZeroDivisionError: division by zero ({tmp_path}/mine.py, line 2)"
    assert code == 1 and shown.rstrip().endswith(
        f"{raised}; when its cause is fixed, the same command continues from step 3"
    )
    assert "Traceback" in log and "Traceback" not in shown
    fixed.touch()
    code, log = run_here(**settings)
    assert code == 0 and "continuing from step 3" in log
    folder, whole = tmp_path / "run", tmp_path / "whole" / "run"
    assert run_here(**settings | {"OUTPUT_DIR": whole})[0] == 0
    assert_same_run(folder, whole)


def test_a_model_that_cannot_be_loaded_is_one_line(run_here, monkeypatch, capfd):
    """Whatever the libraries raise; where, is in training.log alone. A full disk is named as at any other time."""
    raised = [KeyError("lm_head.weight"), OSError(errno.ENOSPC, "No space left on device")]

    def load_base(*given):
        raise raised.pop(0)

    monkeypatch.setattr("grpo.model.load.load_base", load_base)
    code, log = run_here(TOTAL_STEPS=2)
    assert code == 1 and log.rstrip().endswith("C train_grpo: model: KeyError: 'lm_head.weight'")
    assert "in load_base" in log and "Traceback" not in "".join(capfd.readouterr())
    code, log = run_here(TOTAL_STEPS=2)
    assert code == 1 and "no space left on the disk of OUTPUT_DIR=" in log.splitlines()[-1]
    assert "the same command starts at step 0" in log.splitlines()[-1]


def test_a_run_that_learns_nothing_says_so(run_here, user_module):
    """Both, again after WARN_EVERY steps, and in a resumed run that has the earlier steps from metrics.csv."""
    user_module("return [1.0] * len(completions)")
    settings = {"REWARDS": "mine:score", "INVALID_REWARD": 0}  # set, so that garbage may earn as much
    code, log = run_here(**settings, TOTAL_STEPS=4)
    assert code == 0 and "nothing is learned" not in log
    assert log.count("the same reward in every step of this run: nothing was learned") == 1, (
        "too short for the other one"
    )
    code, log = run_here(**settings, TOTAL_STEPS=16)
    assert code == 0 and log.count("nothing is learned") == 2 and log.count("continuing from step 4") == 1
    before = log.split("nothing is learned")[0]
    assert "step 5/16" in before and "step 6/16" not in before


def test_a_nan_reward_is_said(run_here, user_module):
    # In the checks, which have no trainer and so a state of another type, it knows `[k]` from garbage.
    known = "float('[' in one[-1]['content'])"
    training = "type(columns['trainer_state']).__name__ == 'TrainerState'"
    user_module(f"return [None if {training} else {known} for one in completions]")
    code, log = run_here(REWARDS="mine:score", TOTAL_STEPS=2)
    assert code == 0 and log.count("the reward is nan") == 1


def test_the_model_card_names_a_hub_model_and_a_folder(tmp_path):
    card = model_card(Settings(), 7, "action x 1")
    header = card.split("---\n")[1]
    assert "base_model: openai/gpt-oss-20b\n" in header and "library_name: peft\n" in header
    assert 'from_pretrained("openai/gpt-oss-20b"' in card and "trained for 7 steps" in card
    assert "Mxfp4Config" not in card
    assert 'device_map="auto", quantization_config=Mxfp4Config(dequantize=True))' in model_card(
        Settings(LORA_TARGETS="q_proj,7.experts"), 7, ""
    )
    (tmp_path / "mine").mkdir()
    card = model_card(Settings(MODEL_ID=str(tmp_path / "mine")), 7, "action x 1")
    assert str(tmp_path) not in card and 'from_pretrained("mine"' in card and "base_model:" not in card


def test_a_lost_terminal_does_not_keep_the_run_from_saving(tiny, tmp_path):
    """The real thing: the run on a terminal of its own, whose other end is closed. Every write to it fails then, and the
    kernel sends SIGHUP."""
    folder = tmp_path / "run"
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests, and the run with them, would ignore it
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, str(SCRIPT)], environment(folder, SAVE_STEPS=99, HOLD_AT=2))
    os.set_blocking(terminal, False)
    while not folder.with_name("held").exists():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.01)
    os.close(terminal)
    wait_until(lambda: has_line(folder))
    go_on(folder)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    log = (folder / "training.log").read_text(encoding="utf-8")
    assert last_checkpoint(folder)[0] == 2 and (tmp_path / "run.zip").exists()
    assert "the same command continues from step 2" in log and "Traceback" not in log


def test_neither_nohup_nor_a_reader_that_is_gone_ends_the_run(tiny, tmp_path):
    """`nohup train_grpo.py | tee log`, the terminal is closed and the reader ends."""
    folder = tmp_path / "run"
    # What Python cannot flush at its end is exit code 120.
    process = start_held(folder, 1, "nohup", TOTAL_STEPS=3, PYTHONUNBUFFERED="")
    process.send_signal(signal.SIGHUP)
    process.stdout.close()
    go_on(folder)
    assert process.wait() == 0 and (folder / COMPLETE).exists() and has_line(folder, "complete: 3 steps")


def test_a_second_hang_up_is_ignored_and_a_second_ctrl_c_is_not():
    """Shell and kernel both send SIGHUP."""
    request = StopRequest()
    request.at_once = False
    request.receive(signal.SIGHUP)
    request.receive(signal.SIGHUP)
    assert request.signal == signal.SIGHUP
    with pytest.raises(KeyboardInterrupt) as stop:
        request.receive(signal.SIGINT)
    assert stop.value.args == (signal.SIGINT,) and request.signal == signal.SIGHUP


def test_a_second_ctrl_c_ends_the_run_with_one_line(tiny, tmp_path):
    """Held in its second step, the run ends by nothing else."""
    folder = tmp_path / "run"
    process = start_held(folder, 1, SAVE_STEPS=1)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: has_line(folder), process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130 and "Traceback" not in output and "KeyboardInterrupt" not in output
    assert output.rstrip().endswith("stopped at once; the same command continues from step 1")
    assert len(output.split(ASKED)[1].split("\n")) <= 3


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(KeyboardInterrupt(signal.SIGTERM), 143, "stopped at once"), (torch.OutOfMemoryError("x"), 1, "out of memory")],
)
def test_a_signal_to_a_run_that_is_ending_changes_nothing(run_here, monkeypatch, tmp_path, error, code, words):
    """Another supervisor's SIGTERM, milliseconds after the one that ended it; or while the zip of a failed run is made."""

    def train(resolved):
        StopRequest().listen()
        raise error

    def signalled(real):
        return lambda *given: [os.kill(os.getpid(), number) for number in SIGNALS] and real(*given)

    monkeypatch.setattr(train_grpo, "train", train)
    for module, name in ((ending, "continuation"), (train_grpo, "write_archive")):
        monkeypatch.setattr(module, name, signalled(getattr(module, name)))
    ended, log = run_here()
    assert ended == code and words in log and (tmp_path / "run.zip").exists() is (code == 1)


@pytest.mark.parametrize("moment", ["preflight", "launch"])
def test_ctrl_c_before_the_run_begins_is_one_line(monkeypatch, tmp_path, capsys, tiny, moment):
    def stop(*arguments):
        raise KeyboardInterrupt

    for name, value in environment(tmp_path / "run").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_grpo, moment, stop)
    assert train_grpo.main([]) == 130
    assert capsys.readouterr().err.strip() == "interrupted before the run began: nothing was written to OUTPUT_DIR"
    assert not (tmp_path / "run").exists()
