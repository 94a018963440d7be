# SPDX-License-Identifier: Apache-2.0
"""The rooms behind train_grpo.py, in the order in which a run passes through them: settings, data, tasks, run, preflight, model,
rollout, learn, evaluate, measure. A room imports only rooms that stand before it."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python would end in a traceback of some import
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"needs Python 3.11 or newer, and {sys.executable} is {version}: see docs/install.md", file=sys.stderr)
    sys.exit(2)

from grpo.settings import keep_compiled_private

keep_compiled_private()  # whichever script it is: before torch can be imported
