# SPDX-License-Identifier: Apache-2.0
"""A reward function that holds a run in step HOLD_AT until the file `go` lies beside its OUTPUT_DIR.

It gives no rewards, and prints after it held. With it no test has to be faster than the run that it watches.
"""

import os
import time
from pathlib import Path


def hold(completions, *, trainer_state, log_metric, **columns):
    folder = Path(os.environ["OUTPUT_DIR"])
    training = hasattr(log_metric, "__self__")  # A method is the trainer's; checks and evaluations pass a function.
    held = training and trainer_state.global_step + 1 == int(os.environ.get("HOLD_AT", "0"))
    while held and not folder.with_name("go").exists():
        folder.with_name("held").touch()
        time.sleep(0.01)
    if held:
        print("." * 10_000)  # More than Python keeps in a buffer: where the reader is gone, this cannot be written.
    return [None] * len(completions)
