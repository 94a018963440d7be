# SPDX-License-Identifier: Apache-2.0
"""How a run ends: signals, failures, exit codes and last messages.

Under torchrun, whose own exit code is 1 for every reason, the code and the reason are written into OUTPUT_DIR. A reader
that closes the output (`| head`) does not change the exit code of a run."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from grpo.common import InputError, format_exception, log, one_line
from grpo.output.durable import write_text
from grpo.output.folder import continuation
from grpo.output.layout import EXIT, is_full_disk
from grpo.output.logs import detach_closed_terminal, is_unread, start_logging
from grpo.phases import FILE_ONLY
from grpo.process.ranks import RankLost, Ranks
from grpo.reward.calling import RewardError
from grpo.settings.table import Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT_BEHIND_S = 60.0  # Threads and processes that outlive a run have so long to finish their work.
# Two SIGTERMs within this time are one request: a launcher has sent it twice, or a supervisor such as systemd has sent
# it to every process, and the script above this one passed its own on.
SAME_REQUEST_S, SAME_REQUEST_LAUNCHED_S = 1.0, 10.0


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
        self.received = 0.0

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
          process.
        """
        same_request_s = SAME_REQUEST_LAUNCHED_S if self.ranks.launched else SAME_REQUEST_S
        same_request = number == signal.SIGTERM == self.signal and time.monotonic() < self.received + same_request_s
        if self.ranks.is_broken() or same_request:
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
        log.warning("%s: finishing this step and saving a checkpoint; a second signal ends the run at once", name)


class RunFailure(RuntimeError):
    """A failure with an exit `code` of its own. `label` precedes its message; `is_zipped`: the run's zip is written;
    `continues`: the message lacks what the same command does next, and the end of the run adds it."""

    code = 1
    label = "run"
    is_zipped = True
    continues = False


class UnloadableModel(RunFailure):
    """The model's files are damaged in a way that the preflight cannot see."""

    label = "model"
    is_zipped = False


def fail(problems: Sequence[str]) -> int:
    """Prints every problem; returns exit code 2."""
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    end = "Nothing was started and nothing was changed."
    print(f"\n{count} to fix before the run can start:\n\n{listing}\n\n{end}", file=sys.stderr)
    return 2


def handle_failure(
    error: BaseException,
    folder: Path,
    settings: Settings,
    micro_batch: int,
    write_files: Callable[[Path], object] | None,
) -> int:
    """Logs why the run in `folder` ended and what to do next; returns the exit code. `write_files` (None but on
    rank 0) writes report and zip if memory ran out, or if the failure `is_zipped`."""
    ignore_signals()  # A signal may have come just before the caller ignored them.
    advice, code, is_zipped = continuation(folder, settings.OVERWRITE), 1, False
    torch = sys.modules.get("torch")  # If torch is not imported, this is no OutOfMemoryError.
    if isinstance(error, KeyboardInterrupt):
        log.warning("stopped at once; %s", advice)
        code = 128 + (error.args[0] if error.args else signal.SIGINT)
    elif isinstance(error, RunFailure):
        log.critical("%s: %s", error.label, error)
        if error.continues:
            again = "where it fails at the same step again, start another run from a checkpoint (INIT_ADAPTER)"
            log.critical("%s; %s with a lower LEARNING_RATE", advice, again)
        code, is_zipped = error.code, error.is_zipped
    elif torch and isinstance(error, torch.OutOfMemoryError):
        fix, is_zipped = "free some of the GPU", True
        if smaller := micro_batch // 2:
            fix = f"MICRO_BATCH={smaller} learns the same in smaller micro-batches"
        elif settings.EXPERTS == "bf16":
            fix = f"EXPERTS=mxfp4 takes less memory, or {fix}"
        log.critical("out of memory: %s", str(error).splitlines()[0])
        log.critical("%s; then the same command continues", fix)
    elif is_full_disk(error, folder):
        log.critical("no space left on a disk (`df -h` and `df -i` tell which): %s. Free some, %s", error, advice)
    elif isinstance(error, RewardError):
        log.info("a reward function failed", exc_info=error, extra=FILE_ONLY)
        log.critical("%s; when its cause is fixed, %s", error, advice)
    else:
        log.critical("the run failed", exc_info=error)
        log.critical("when its cause is fixed, %s", advice)
    if write_files and is_zipped:
        write_files(folder)
    return code


class LastMessageHandler(logging.Handler):
    """Keeps the last message of this program's log. Messages that are not critical do not replace a critical one."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.message, self.fatal = "", False

    def emit(self, record: logging.LogRecord) -> None:
        fatal = record.levelno >= logging.CRITICAL
        if fatal >= self.fatal:
            message = one_line(record.getMessage().strip())
            if record.exc_info and record.exc_info[1]:
                message += f" ({format_exception(record.exc_info[1])})"
            self.message = f"{self.message}; {message}" if self.fatal else message
            self.fatal = fatal


def record_end(ranks: Ranks, folder: Path, overwrite: bool, run: Callable[[], int]) -> int:
    """Calls `run` in a process that torchrun started, and returns its exit code. Writes the code and its reason into
    training.log and exit.json, because torchrun reports neither. `overwrite`: OVERWRITE of the run in `folder`."""
    last_message, code = LastMessageHandler(), 1
    log.addHandler(last_message)
    if ranks.rank:
        log.propagate = False

    def write_lost_rank(lost: RankLost) -> None:
        """Writes which rank was lost. If that is rank 0, and it left no message, the first of the others writes it."""
        if ranks.rank:
            if lost.rank or lost.message:
                return
            time.sleep(2 * (ranks.rank - 1))  # A lower rank writes first, and this one then finds its file.
            if (folder / EXIT).exists() or not (folder / "training.log").is_file():
                return
            start_logging(folder)
            log.propagate = True
        write_end(folder, lost.code, f"{lost}; {continuation(folder, overwrite)}")

    ranks.on_lost = write_lost_rank
    try:
        code = run()
        if not ranks.rank and code != 2:
            write_end(folder, code, last_message.message)
    except RankLost as lost:
        code = lost.code
        write_lost_rank(lost)
    finally:
        log.removeHandler(last_message)
        ranks.disconnect(code, last_message.message or f"exit code {code}")
    return code


def write_end(folder: Path, code: int, reason: str) -> None:
    """Writes the exit code and its reason as the last line of training.log, and into EXIT."""
    (log.warning if code else log.info)("exit code %d: %s", code, reason)
    if folder.is_dir():
        write_text(folder / EXIT, json.dumps({"code": code, "reason": reason}) + "\n")


def end_quietly(main: Callable[[], int]) -> int:
    """Returns the exit code of `main`. If the reader of its output is gone (`--help | head`), there is no traceback,
    and the exit code is that of a command which SIGPIPE ended."""
    code = None
    try:
        code = main()
        sys.stdout.flush()
        return code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread(sys.stdout.fileno()):
            code = 128 + signal.SIGPIPE
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


# Disks and permissions, which the user can mend: other OSErrors may be a fault of the program.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def run_script(main: Callable[[], int]) -> int:
    """`end_quietly` for a script: it prints the problems of an InputError, a RunFailure, a RewardError or a disk, and
    returns their exit code. Output that is cut off, as by a full disk, is no success. The first SIGINT, SIGTERM or
    SIGHUP ends the script by KeyboardInterrupt, so that its temporary files are removed; the second ends it at once.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
        raise KeyboardInterrupt(number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP.
            signal.signal(number, interrupt)

    def flushed_main() -> int:
        code = main()
        sys.stdout.flush()
        return code

    try:
        return end_quietly(flushed_main)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"{error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends.
        return 1
    except InputError as error:
        print(*error.args, sep="\n", file=sys.stderr)
        return 2
    except RunFailure as error:
        print(f"{error.label}: {error}", file=sys.stderr)
        return error.code
    except RewardError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print("\ninterrupted", file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
