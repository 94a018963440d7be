# SPDX-License-Identifier: Apache-2.0
"""How a run ends: the exit code and the last message of every failure, also under torchrun, whose own exit code is 1
for every reason, and where nobody reads its output."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo.data.scoring import RewardError
from grpo.phases import FILE_ONLY
from grpo.run.durable import write_text
from grpo.run.folder import continuation, full_disk
from grpo.run.logs import is_unread, start_logging
from grpo.run.place import EXIT
from grpo.run.ranks import RankLost, Ranks
from grpo.run.signals import ignore_signals
from grpo.settings import Settings, described, log, one_line


class RunFailure(RuntimeError):
    """A failure with an exit code of its own; `label` is what stands before its message. `is_zipped`: the run's zip is
    written after it."""

    code = 1
    label = "run"
    is_zipped = True


class UnloadableModel(RunFailure):
    """The model's files have damage that the preflight cannot see."""

    label = "model"
    is_zipped = False


def fail(problems: Sequence[str]) -> int:
    """Print every problem; returns exit code 2."""
    plural = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    end = "Nothing was started and nothing was changed."
    print(f"\n{plural} to fix before the run can start:\n\n{listing}\n\n{end}", file=sys.stderr)
    return 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory ran out. Nothing raises that before torch is imported, which this module does not do."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def answer_failure(
    error: BaseException,
    folder: Path,
    settings: Settings,
    micro_batch: int,
    write_archive: Callable[[Path], object] | None,
) -> int:
    """Log why the run in `folder` ended, and what to do next; returns the exit code. `write_archive` writes the run's
    zip; None on ranks other than 0."""
    if isinstance(error, KeyboardInterrupt):
        ignore_signals()  # where one more came just before the first call
        log.warning("stopped at once; %s", continuation(folder, vars(settings)))
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    if isinstance(error, RunFailure):
        log.critical("%s: %s", error.label, error)
        if write_archive and error.is_zipped:
            write_archive(folder)
        return error.code
    if is_out_of_memory(error):
        way = "free some of the GPU"
        if smaller := micro_batch // 2:
            way = f"MICRO_BATCH={smaller} learns the same in smaller micro-batches"
        elif settings.EXPERTS == "bf16":
            way = f"EXPERTS=mxfp4 takes less memory, or {way}"
        log.critical("out of memory: %s", str(error).splitlines()[0])
        log.critical("%s; then the same command continues", way)
        if write_archive:
            write_archive(folder)
        return 1
    again = continuation(folder, vars(settings))
    if disk := full_disk(error, folder):
        log.critical("no space left on the disk of %s: free some, %s", disk, again)
    elif isinstance(error, RewardError):
        log.info("a reward function failed", exc_info=error, extra=FILE_ONLY)
        log.critical("%s; when its cause is fixed, %s", error, again)
    else:
        log.critical("the run failed", exc_info=error)
        log.critical("when its cause is fixed, %s", again)
    return 1


class LastMessageHandler(logging.Handler):
    """Keeps what this program's log says last; what is critical before anything that follows."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.message, self.fatal = "", False

    def emit(self, record: logging.LogRecord) -> None:
        fatal = record.levelno >= logging.CRITICAL
        if fatal >= self.fatal:
            raised = f" ({described(record.exc_info[1])})" if record.exc_info else ""
            message = one_line(record.getMessage().strip()) + raised
            self.message = f"{self.message}; {message}" if self.fatal else message
            self.fatal = fatal


def record_end(ranks: Ranks, folder: Path, settings: Settings, run: Callable[[], int]) -> int:
    """The exit code of `run`, one of several processes that torchrun started. As torchrun tells neither, this also
    writes the exit code and its reason into training.log and exit.json."""
    last_message, code = LastMessageHandler(), 1
    log.addHandler(last_message)
    if ranks.rank:
        log.propagate = False

    def write_loss(lost: RankLost) -> None:
        """Rank 0 writes who is gone. Where rank 0 itself is, and wrote nothing, the first other rank does."""
        if ranks.rank:
            if lost.rank or lost.message:
                return
            time.sleep(2 * (ranks.rank - 1))
            if (folder / EXIT).exists() or not (folder / "training.log").is_file():
                return
            start_logging(folder)
            log.propagate = True
        write_end(folder, lost.code, f"{lost}; {continuation(folder, vars(settings))}")

    ranks.on_lost = write_loss
    try:
        code = run()
        if not ranks.rank and code != 2:
            write_end(folder, code, last_message.message)
    except RankLost as lost:
        code = lost.code
        write_loss(lost)
    finally:
        log.removeHandler(last_message)
        ranks.leave(code, last_message.message or f"exit code {code}")
    return code


def write_end(folder: Path, code: int, words: str) -> None:
    """The exit code and its reason as the last line of training.log, and in EXIT."""
    (log.warning if code else log.info)("exit code %d: %s", code, words)
    if folder.is_dir():
        write_text(folder / EXIT, json.dumps({"code": code, "reason": words}) + "\n")


def end_quietly(main: Callable[[], int]) -> int:
    """The exit code of `main`. Where it is cut short because the reader of its output has gone (`--help | head`), there
    is no traceback, and the code is that of a command which SIGPIPE ends."""
    code = 128 + signal.SIGPIPE
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    return code
