# SPDX-License-Identifier: Apache-2.0
"""Runs that fail or are asked to end; what they say of it and what they leave."""

from __future__ import annotations

import contextlib
import math
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, SCRIPT, read_csv
from runs import environment, go_on, has_line, start_held, wait_until
from safetensors.torch import load_file

import train_grpo
from grpo.evaluate.heldout_reward import HeldoutEvaluation
from grpo.learn.distributed import adapter_parameters
from grpo.learn.learner import Learner
from grpo.output.checkpoints import find_checkpoint
from grpo.output.layout import ADAPTER, COMPLETE
from grpo.process import ending
from grpo.process.ending import SIGNALS, StopRequest
from grpo.process.ranks import Ranks
from grpo.settings.table import Settings


@pytest.fixture
def run_here(monkeypatch, tmp_path, quiet):
    """A run in this process: (exit code, training.log)."""

    def run_once(**settings: object) -> tuple[int, str]:
        for name, value in environment(tmp_path / "run", **settings).items():
            monkeypatch.setenv(name, value)
        quiet()  # of an earlier run
        code, folder = train_grpo.main([]), Path(os.environ["OUTPUT_DIR"])
        return code, (folder / "training.log").read_text(encoding="utf-8")

    return run_once


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
    again = "the same command WITH OVERWRITE=0"  # Also that of scripts/demo.sh, which sets 1 itself.
    assert code == 143 and "finishing this step" not in log
    if during == "before":
        assert f"stopped at once; {again} starts at step 0: no checkpoint was saved" in log and "step 1/" not in log
    else:
        assert f"interrupted at step 2; {again} continues from step 2" in log
        assert (tmp_path / "run.zip").exists() and not (tmp_path / "run" / COMPLETE).exists()


def test_a_failure_ends_with_what_to_do_whatever_signals_come(run_here, monkeypatch, tmp_path):
    """Another supervisor's SIGTERM comes milliseconds after the first one, or while a failed run is zipped."""

    def load(*arguments):
        StopRequest().listen()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nmore")

    def signalled(real):
        return lambda *arguments: [os.kill(os.getpid(), number) for number in SIGNALS] and real(*arguments)

    monkeypatch.setattr("grpo.model.load.load_to_train", load)
    for module, name in ((ending, "continuation"), (train_grpo, "write_report_and_zip")):
        monkeypatch.setattr(module, name, signalled(getattr(module, name)))
    code, log = run_here(MICRO_BATCH=6)
    assert code == 1 and "C train_grpo: MICRO_BATCH=3 learns the same" in log and (tmp_path / "run.zip").exists()


def test_a_reward_function_that_fails_loses_no_finished_step(run_here, monkeypatch, tmp_path, capfd):
    """At step 4, with a checkpoint at 2: one of step 3 is saved."""
    fixed = tmp_path / "fixed"
    failing = f"columns['trainer_state'].global_step == 3 and not __import__('pathlib').Path({str(fixed)!r}).exists()"
    values = f"[1 / (not ({failing})) * len(text) for text in completions]"
    (tmp_path / "mine.py").write_text(f"def score(completions, **columns):\n    return {values}\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, log = run_here(REWARDS="action,mine:score=0.01", TOTAL_STEPS=4)
    shown = capfd.readouterr().out
    last = shown.rstrip().splitlines()[-1]
    assert "REWARDS: mine:score raised ZeroDivisionError: division by zero (" in last
    assert last.endswith("mine.py, line 2); when its cause is fixed, the same command continues from step 3")
    assert code == 1 and "Traceback" in log and "Traceback" not in shown
    fixed.touch()
    code, log = run_here(REWARDS="action,mine:score=0.01", TOTAL_STEPS=4)
    assert code == 0 and "continuing from step 3" in log


@pytest.mark.parametrize(("step", "value"), [(3, math.nan), (4, math.inf)])
def test_a_gradient_that_is_not_finite_is_neither_stepped_nor_saved(run_here, monkeypatch, tmp_path, step, value):
    """Also in the last step. The next start continues from the checkpoint before it."""
    real = Learner.learn

    def learn(self, model, *arguments):
        loss = real(self, model, *arguments)
        if self.state.global_step == step - 1:
            adapter_parameters(model)[-1].grad.view(-1)[0] = value
        return loss

    folder, settings = tmp_path / "run", {"TOTAL_STEPS": 4, "SAVE_STEPS": 1, "REWARDS": "action"}
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", learn)
        code, log = run_here(**settings)
    assert code == 1 and f"the gradient of step {step} is not finite: the step was not made" in log
    assert f"the same command continues from step {step - 1}; where it fails at the same step again" in log
    assert "Traceback" not in log and not (folder / ADAPTER).exists()
    assert find_checkpoint(folder)[0] == step - 1 and not (folder / f"checkpoint-{step}").exists()
    code, log = run_here(**settings)
    assert code == 0 and f"continuing from step {step - 1}" in log
    for path in folder.rglob(ADAPTER):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values()), path


def test_weights_that_are_not_finite_are_not_saved(run_here, monkeypatch, tmp_path):
    """Where a finite gradient made them so."""
    real, folder, settings = torch.optim.AdamW.step, tmp_path / "run", {"TOTAL_STEPS": 3, "SAVE_STEPS": 1}
    settings["REWARDS"] = "action"

    def step(self, *arguments, **options):
        real(self, *arguments, **options)
        if (folder / "checkpoint-1").exists():
            self.param_groups[0]["params"][0].data[0] = math.inf

    # The clock is set back all the time, which does not count.
    monkeypatch.setattr("time.time", lambda: 3e9 - time.monotonic())
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        code, log = run_here(**settings)
    assert code == 1 and "the weights are not finite after step 2: nothing of this step was saved" in log
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    code, log = run_here(**settings)
    assert code == 0 and re.search(r"complete: 3 steps in \d+ s", log)


JUDGE = """
from pathlib import Path
from rewards import parse_action
def judge(raw_completions, trainer_state, log_metric, **columns):
    if log_metric.__name__ == "log_nothing" and trainer_state.global_step == 2 and Path("fail").exists():
        raise ConnectionError("the judge is away")
    assert trainer_state.max_steps == 3, "before training too"
    return [float(parse_action(text) == 1) for text in raw_completions]
"""


def test_a_judge_that_fails_in_an_evaluation_loses_no_finished_step(run_here, monkeypatch, tmp_path):
    """Neither in the log nor on the disk: the checkpoint of SAVE_STEPS would come much later."""
    (tmp_path / "my_judge.py").write_text(JUDGE)
    (tmp_path / "fail").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_judge", raising=False)
    data = ROOT / "data/tes_heldout_compact.csv"
    settings = dict(REWARDS="my_judge:judge", DATA=data, TOTAL_STEPS=3, SAVE_STEPS=99, EVAL_STEPS=1, EVAL_SAMPLES=1)
    code, log = run_here(**settings, EVAL_EXACT=0, INVALID_REWARD=0, MAX_COMPLETION_LEN=12)
    assert code == 1 and "my_judge:judge raised ConnectionError: the judge is away (my_judge.py, line 6)" in log
    assert "step 2 was not measured" in log and "the same command continues from step 2" in log
    steps = read_csv(tmp_path / "run" / "metrics.csv")
    assert [bool(row["heldout_reward"]) for row in steps] == [True, False]
    (tmp_path / "fail").unlink()
    code, log = run_here(**settings, EVAL_EXACT=0, INVALID_REWARD=0, MAX_COMPLETION_LEN=12)
    assert code == 0 and "continuing from step 2" in log
    assert [row["step"] for row in read_csv(tmp_path / "run" / "metrics.csv")] == ["1", "2", "3"]


def test_a_lost_terminal_does_not_keep_the_run_from_saving(tmp_path):
    """The run has a terminal of its own, whose other end is closed: then every write to it fails, and the kernel sends
    SIGHUP."""
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
    assert find_checkpoint(folder)[0] == 2 and (tmp_path / "run.zip").exists()
    assert "the same command continues from step 2" in log and "Traceback" not in log


def test_neither_nohup_nor_a_reader_that_is_gone_ends_the_run(tmp_path):
    """`nohup train_grpo.py | tee log`, the terminal is closed and the reader ends."""
    folder = tmp_path / "run"
    # What Python cannot flush at its end is exit code 120.
    process = start_held(folder, 1, "nohup", TOTAL_STEPS=3, PYTHONUNBUFFERED="")
    process.send_signal(signal.SIGHUP)
    process.stdout.close()
    go_on(folder)
    assert process.wait() == 0 and (folder / COMPLETE).exists() and has_line(folder, "complete: 3 steps")


def test_a_second_hang_up_is_ignored_and_a_second_ctrl_c_is_not(caplog):
    """Shell and kernel both send SIGHUP."""
    request = StopRequest()
    request.at_once = False
    request.receive(signal.SIGHUP)
    request.receive(signal.SIGHUP)
    assert request.signal == signal.SIGHUP and caplog.text.count("SIGHUP: finishing this step") == 1
    with pytest.raises(KeyboardInterrupt) as stop:
        request.receive(signal.SIGINT)
    assert stop.value.args == (signal.SIGINT,) and request.signal == signal.SIGHUP


def test_a_supervisor_that_signals_every_process_asks_once(monkeypatch):
    """As systemd does, and the script in between passes its own on. A second SIGTERM later ends the run at once."""
    request, now = StopRequest(), 100.0
    request.at_once = False
    monkeypatch.setattr(ending.time, "monotonic", lambda: now)
    request.receive(signal.SIGTERM)
    now = 100.9
    request.receive(signal.SIGTERM)
    now = 101.1
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGTERM)


def test_the_own_copy_of_a_signal_that_another_process_got_is_no_second_request(monkeypatch):
    """On two machines a signal arrives seconds apart, and a rank learns of it from the other one first."""
    request, now = StopRequest(Ranks(1, 2, launched=True)), 100.0
    request.at_once = False
    monkeypatch.setattr(ending.time, "monotonic", lambda: now)
    request.adopt(signal.SIGINT)
    now = 103.0
    request.receive(signal.SIGINT)
    assert request.signal == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGINT)


def test_a_signal_while_the_files_are_written_interrupts_nothing(tmp_path, monkeypatch, caplog):
    """The run has trained and evaluated all of its steps: it is complete."""
    folder, stop = tmp_path / "run", StopRequest()
    folder.mkdir()
    monkeypatch.setattr(train_grpo, "write_report_and_zip", lambda *_: stop.receive(signal.SIGTERM))
    save = lambda path: (Path(path) / ADAPTER).write_text("weights") if Path(path).mkdir() is None else None  # noqa: E731
    trainer = SimpleNamespace(
        run=SimpleNamespace(folder=folder, stop=stop, settings=Settings()),
        save_model=save,
        processing_class=SimpleNamespace(save_pretrained=lambda path: None),
        write_model_card=lambda path: None,
        state=SimpleNamespace(global_step=3),
    )
    end = train_grpo.finish(trainer, SimpleNamespace(after=lambda trainer: None), 0.0)
    assert (end.signal, end.steps) == (0, 3) and (folder / COMPLETE).exists()
    assert "SIGTERM: writing the run's last files; a second signal" in caplog.text, "there is no step to finish"
