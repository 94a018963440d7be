# SPDX-License-Identifier: Apache-2.0
"""How a program ends. `decide_outcome` alone says with which exit code and message; all else only reports that.

What Ctrl-C (SIGINT), SIGTERM and a lost terminal (SIGHUP) do to a run:
- before it has begun: it ends at once, and nothing was written;
- while it loads and in the evaluations before and after training: it ends at once, after training with report and zip;
- while it trains: it finishes its step, saves a checkpoint, report and zip, and ends. A second signal ends it at once,
  and the same command continues from the last checkpoint. `StopRequest` says which second signals do not count.
The exit code is 128 + the signal's number. To any other script (`run_script`) the first signal is an exception, so that
temporary files are removed, and the second one ends it at once.
"""

import atexit
import errno
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType

from grpo.common import InputError, format_exception, log, one_line
from grpo.output.durable import write_text
from grpo.output.folder import continuation
from grpo.output.layout import EXIT, TRAINING_LOG, is_full_disk, zip_path
from grpo.output.logs import start_logging
from grpo.output.terminal import detach_closed_terminal, is_unread
from grpo.phases import FILE_ONLY
from grpo.process.heartbeat import RankLost
from grpo.process.ranks import Ranks
from grpo.reward.calling import RewardError
from grpo.settings.table import Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT_BEHIND_S = 60.0  # Threads and processes that outlive a run have so long to finish their work.
# Two SIGTERMs within this time are one request: a launcher has sent it twice, or a supervisor such as systemd has sent
# it to every process, and the script above this one passed its own on.
SAME_REQUEST_S, SAME_REQUEST_LAUNCHED_S = 1.0, 10.0
# Disks and permissions, which the user of a script can mend: other OSErrors may be a fault of the program.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


class ExitCode(IntEnum):
    """The exit codes of train_grpo.py, each with a sentence for the user: `--help` and docs/report.md list them."""

    sentence: str

    def __new__(cls, code: int, sentence: str) -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_, member.sentence = code, sentence
        return member

    COMPLETE = 0, "The run is complete, and complete.json is there."
    FAILED = 1, "The run failed in another way, such as too little memory: training.log says why."
    INPUT = 2, "The input must be fixed, or nothing is left to do; nothing was started."
    MISMATCH = 3, "vLLM and the trainer do not agree (the mismatch check)."
    VLLM = 4, "vLLM failed; the same command continues from the last checkpoint."
    LOST_TERMINAL = 128 + signal.SIGHUP, "Interrupted by a lost terminal; the same command continues the run."
    CTRL_C = 128 + signal.SIGINT, "Interrupted by Ctrl-C; the same command continues the run."
    TERMINATED = 128 + signal.SIGTERM, "Interrupted by SIGTERM (kill); the same command continues the run."


def exit_codes_text() -> str:
    return "\n".join(["Exit codes:", "", *(f"  {code:>3}  {code.sentence}" for code in ExitCode)])


def ignore_signals() -> None:
    """Ignores signals from here on, so that none changes the last message and the exit code of a run that is ending."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """While the run trains, the first signal ends it after the step and a checkpoint, and the second one at once; at
    any other time the first one ends it at once."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.signal = 0  # The number of the first signal; 0 if there was none.
        self.at_once = True  # True while nothing can be lost: before training, and in the evaluation after it.
        self.work = "finishing this step and saving a checkpoint"  # What is done first where it does not end at once.
        self.received = 0.0
        self.is_adopted = False  # Whether another process got the signal, and this one's own copy may still come.

    def listen(self) -> None:
        """Handles the three signals. A SIGHUP that `nohup` ignores stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a signal; raises KeyboardInterrupt(number) to end the run at once. These are ignored:
        - torchrun's SIGTERM after another process has ended: the run is about to report which one;
        - a second SIGHUP, as shell and kernel both send one when a terminal is lost;
        - a second SIGTERM within SAME_REQUEST_S, longer under a launcher: Slurm and scripts/torchrun.sh signal every
          process;
        - the same request that another process got first, and this one learned of from it (`adopt`).
        """
        same_request_s = SAME_REQUEST_LAUNCHED_S if self.ranks.launched else SAME_REQUEST_S
        repeated = self.is_adopted or number == signal.SIGTERM == self.signal
        if self.ranks.is_broken() or (repeated and time.monotonic() < self.received + same_request_s):
            self.is_adopted = False
            return
        self.received = time.monotonic()
        if number == signal.SIGHUP:
            detach_closed_terminal()
            if self.signal:
                return
        at_once = self.at_once or self.signal
        self.signal, self.at_once = self.signal or number, False
        if at_once:
            raise KeyboardInterrupt(number)
        name = signal.Signals(number).name
        log.warning("%s: %s; a second signal ends the run at once", name, self.work)

    def adopt(self, number: int) -> None:
        """Takes the signal that any process of the run got, which ends all of them with the same exit code."""
        if not self.signal:
            self.received, self.is_adopted = time.monotonic(), True
        self.signal = number


class RunFailure(RuntimeError):
    """A failure with an exit `code` of its own. `label` precedes its message; `is_zipped`: the run's zip is written;
    `continues`: the message lacks what the same command does next, and the end of the run adds it."""

    code: int = ExitCode.FAILED
    label = "run"
    is_zipped = True
    continues = False


class UnloadableModel(RunFailure):
    """The model's files are damaged in a way that the preflight cannot see."""

    label = "model"
    is_zipped = False


@dataclass(frozen=True)
class Finished:
    """A run that has made its last step, or the one after which a `signal` ended it, and has written all its files."""

    folder: Path
    steps: int
    seconds: float
    signal: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a program ended: its exit code, and the `lines` that say why and what to do next."""

    code: int
    lines: tuple[str, ...] = ()
    level: int = logging.CRITICAL
    error: BaseException | None = None  # training.log gets its traceback.
    is_fault: bool = False  # Nobody foresaw `error`: its traceback belongs on the terminal too.
    is_zipped: bool = False  # Report and zip are still to be written.

    @property
    def reason(self) -> str:
        """Why the program ended, on one line."""
        cause = f" ({format_exception(self.error)})" if self.error and self.is_fault else ""
        return one_line("; ".join([self.lines[0] + cause, *self.lines[1:]])) if self.lines else f"exit code {self.code}"


@dataclass(frozen=True)
class StartedRun:
    """A run whose input is in order, and whose end is reported in its folder."""

    folder: Path
    settings: Settings
    micro_batch: int = 0
    ranks: Ranks = field(default_factory=Ranks)

    def run_to_the_end(self, train: Callable[[], Finished], write_files: Callable[[Path], object]) -> Outcome:
        """Calls `train`, and writes how it ended into the terminal and training.log, after some failures also report
        and zip by `write_files`. torchrun, whose own exit code is 1 for every reason, gets EXIT."""
        end: Finished | BaseException
        try:
            try:
                end = train()
            finally:
                ignore_signals()
        except RankLost as lost:
            return self.report_lost(lost)
        except (Exception, KeyboardInterrupt) as error:
            end = error
        ignore_signals()  # A signal may have come just before the others were ignored.
        outcome = decide_outcome(end, self)
        if outcome.error and not outcome.is_fault:
            log.info("the traceback of the error", exc_info=outcome.error, extra=FILE_ONLY)
        for number, line in enumerate(outcome.lines):
            log.log(outcome.level, "%s", line, exc_info=None if number or not outcome.is_fault else outcome.error)
        if outcome.is_zipped and not self.ranks.rank:
            write_files(self.folder)
        if self.ranks.launched and not self.ranks.rank:
            self.write_exit(outcome)
        return outcome

    def report_lost(self, lost: RankLost) -> Outcome:
        """Writes which rank was lost. If that is rank 0, and it left no message, the first of the others writes it."""
        outcome = decide_outcome(lost, self)
        if not self.ranks.rank:
            self.write_exit(outcome)
        elif not (lost.rank or lost.message):
            time.sleep(2 * (self.ranks.rank - 1))  # A lower rank writes first, and this one then finds its file.
            if not (self.folder / EXIT).exists() and (self.folder / TRAINING_LOG).is_file():
                start_logging(self.folder)
                self.write_exit(outcome)
        return outcome

    def write_exit(self, outcome: Outcome) -> None:
        """Writes the exit code and its reason as the last line of training.log, and into EXIT."""
        (log.warning if outcome.code else log.info)("exit code %d: %s", outcome.code, outcome.reason)
        if self.folder.is_dir():
            write_text(self.folder / EXIT, json.dumps({"code": outcome.code, "reason": outcome.reason}) + "\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate memory; without torch imported it was none of its errors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def smaller_batch_advice(run: StartedRun) -> str:
    """What lets the same command continue a run that ran out of GPU memory."""
    fix = "free some of the GPU"
    if smaller := run.micro_batch // 2:
        fix = f"MICRO_BATCH={smaller} learns the same in smaller micro-batches"
    elif run.settings.EXPERTS == "bf16":
        fix = f"EXPERTS=mxfp4 takes less memory, or {fix}"
    return f"{fix}; then the same command continues"


def decide_outcome(end: Finished | BaseException, run: StartedRun | None = None) -> Outcome:
    """Exit code and message of a program that ended by `end`: what a run returned, or the exception that ended it.
    `run` is None before a run has begun and in any other script: then there is nothing to continue."""
    if isinstance(end, Finished) and not end.signal:
        place = f"Adapter: {end.folder}, download: {zip_path(end.folder)}"
        words = f"complete: {end.steps} steps in {end.seconds:.0f} s. {place}"
        return Outcome(ExitCode.COMPLETE, (words,), logging.INFO)
    advice = continuation(run.folder, run.settings.OVERWRITE) if run else ""
    match end:
        case Finished():
            words = f"interrupted at step {end.steps}; {advice}. So far: {zip_path(end.folder)}"
            return Outcome(128 + end.signal, (words,), logging.WARNING)
        case KeyboardInterrupt():
            number = end.args[0] if end.args else signal.SIGINT
            words = f"stopped at once; {advice}" if run else "interrupted"
            return Outcome(128 + number, (words,), logging.WARNING)
        case RankLost():
            return Outcome(end.code, (f"{end}; {advice}" if run else str(end),))
        case InputError() if not run:
            return Outcome(ExitCode.INPUT, end.args)
        case BrokenPipeError() if not run and is_unread(sys.stdout.fileno()):
            return Outcome(128 + signal.SIGPIPE)  # As of a command that SIGPIPE ended.
        case OSError() if not run and end.errno in UNWRITABLE:
            return Outcome(ExitCode.FAILED, (f"{end.filename or 'output'}: {end.strerror}",))
        case RunFailure():
            words = f"{end.label}: {end}"
            again = "where it fails at the same step again, start another run from a checkpoint (INIT_ADAPTER)"
            more = (f"{advice}; {again} with a lower LEARNING_RATE",) if run and end.continues else ()
            return Outcome(end.code, (words, *more), is_zipped=end.is_zipped)
        case _ if run and is_out_of_memory(end):
            words = f"out of memory: {str(end).splitlines()[0]}"
            return Outcome(ExitCode.FAILED, (words, smaller_batch_advice(run)), is_zipped=True)
        case _ if run and is_full_disk(end, run.folder):
            words = f"no space left on a disk (`df -h` and `df -i` tell which): {end}. Free some, {advice}"
            return Outcome(ExitCode.FAILED, (words,))
        case RewardError():
            words = f"{end}; when its cause is fixed, {advice}" if run else str(end)
            return Outcome(ExitCode.FAILED, (words,), error=end)
    lines = ("the run failed", f"when its cause is fixed, {advice}") if run else ("the run failed",)
    return Outcome(ExitCode.FAILED, lines, error=end, is_fault=True)


def print_refusal(outcome: Outcome) -> None:
    """Prints why a run did not begin: every problem of its input, or what ended it before."""
    if outcome.code != ExitCode.INPUT:
        print(f"\n{outcome.reason} before the run began: nothing was written to OUTPUT_DIR", file=sys.stderr)
        return
    problems = outcome.lines
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    end = "Nothing was started and nothing was changed."
    print(f"\n{count} to fix before the run can start:\n\n{listing}\n\n{end}", file=sys.stderr)


def end_quietly(main: Callable[[], int]) -> int:
    """Returns the exit code of `main`. If the reader of its output is gone (`--help | head`), there is no traceback. A
    terminal that was closed, or whose disk is full, does not change the exit code of a run that has ended."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # A shell's `>&-` closed it: the next file would get its number, and its output.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, until the process ends
    code = None
    try:
        code = main()
        sys.stdout.flush()
        return code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and not (outcome := decide_outcome(error)).is_fault:
            code = outcome.code
        elif code is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends.
        return code
    finally:
        end_what_is_left(1 if code is None else code)


def end_what_is_left(code: int) -> None:
    """Ends this process with `code` LEFT_BEHIND_S after its main thread, if reward functions have left threads or
    processes behind: Python waits for them for ever, and so would the bill of a rented GPU."""

    def left_behind() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.is_alive() and not thread.daemon]

    def wait_and_end() -> None:
        threading.main_thread().join()
        time.sleep(LEFT_BEHIND_S)
        children, threads = multiprocessing.active_children(), left_behind()
        if names := [*(child.name for child in children), *(thread.name for thread in threads)]:
            text = f"still running {LEFT_BEHIND_S:g} s after the end, and ended now: {', '.join(names)}"
            os.write(2, f"{text} (a reward function may have left it)\n".encode(errors="backslashreplace"))
        for child in children:
            child.terminate()
        if threads:
            atexit._run_exitfuncs()  # Such as a tracker's last upload.
            os._exit(code)

    if len(left_behind()) > 1 or multiprocessing.active_children():  # The main thread is one of them.
        threading.Thread(target=wait_and_end, name="end", daemon=True).start()


def run_script(main: Callable[[], int]) -> int:
    """`end_quietly` for a script: it prints what the user can mend. Output that is cut off, as by a full disk, is no
    success. The first SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt, so that temporary files are removed; the second
    one ends the script at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
        raise KeyboardInterrupt(number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP.
            signal.signal(number, interrupt)

    def main_that_says_why() -> int:
        try:
            code = main()
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            outcome = decide_outcome(error)
            if outcome.is_fault:
                raise
            if isinstance(error, KeyboardInterrupt):
                print(file=sys.stderr)  # The terminal shows ^C on the line.
            for line in outcome.lines:
                print(line, file=sys.stderr)
            return outcome.code

    return end_quietly(main_that_says_why)
