# SPDX-License-Identifier: Apache-2.0
"""Sends signals to a program at chosen moments of any of its processes. scripts/dev/reliability.py makes every Python
process of a case begin with `watch_files`."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NamedTuple

CASE, MOMENT, FIRST = "CAMPAIGN_CASE", "CAMPAIGN_MOMENT", "CAMPAIGN_FIRST"  # Environment variables.
OPERATIONS = "operations"  # The folder in a case's folder with a file for each role, and STRUCK.
STRUCK = "struck"  # A file that is made when the signal is sent.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")


class Moment(NamedTuple):
    """Just before a file operation of the process with this role, or some seconds later, the signal `number` goes to
    this process (`self`), to the first one of the case, or to all of them."""

    role: str = "nobody"
    operation: str = "0"
    number: str = "0"
    delay: str = "0"
    scope: str = "self"


NO_SIGNAL = Moment()


def send_signal(case: str, scope: str, number: int) -> list[str]:
    """Sends a signal to processes of a case, to this one last; returns the command lines of all of the case's
    processes. Signal 0 changes nothing."""
    import psutil  # Imported here, as every process of a case imports this module.

    fields = [process.info for process in psutil.process_iter(["pid", "environ", "cmdline"])]
    commands = {info["pid"]: info["cmdline"] for info in fields if (info["environ"] or {}).get(CASE) == case}
    pids = commands if scope == "all" else [os.getpid() if scope == "self" else int(os.environ[FIRST])]
    for pid in sorted(pids, key=os.getpid().__eq__):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return [" ".join(words or ()) for words in commands.values()]


def watch_files() -> None:
    """Counts this process's file operations in its case's folder, and strikes at the MOMENT. It sees what Python opens
    for writing, makes, renames and deletes; delayed signals also meet the insides of torch.save."""
    case, moment, count = os.environ[CASE], Moment(*os.environ[MOMENT].split()), 0
    words = sys.orig_argv[1:]
    scripts = [Path(word).stem for word in words if word.endswith(".py")]
    if not scripts:
        return
    role = "torchrun" if words[0] == "-m" else scripts[0] + os.environ.get("RANK", "")
    if FIRST not in os.environ:
        os.environ[FIRST] = str(os.getpid())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # The campaign's shell may ignore both signals.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    record = os.open(f"{case}/{OPERATIONS}/{role}", os.O_CREAT | os.O_WRONLY)

    def strike() -> None:
        os.close(os.open(f"{case}/{OPERATIONS}/{STRUCK}", os.O_CREAT | os.O_WRONLY))
        send_signal(case, moment.scope, int(moment.number))

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in EVENTS or not str(arguments[0]).startswith(f"{case}/"):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        count += 1
        os.pwrite(record, f"{count:9d}".encode(), 0)
        if role == moment.role and count == int(moment.operation):
            timer = threading.Timer(float(moment.delay), strike)
            timer.daemon = True
            timer.start() if float(moment.delay) else strike()

    sys.addaudithook(hook)
