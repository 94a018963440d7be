# SPDX-License-Identifier: Apache-2.0
"""The rooms behind train_grpo.py: settings, data, reward, figures, tasks, output, process, environment, plan,
preflight, model, rollout, learn, evaluate, verl. A room imports only rooms before it."""

import contextlib
import os
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python would end in a traceback of some import
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"needs Python 3.11 or newer, and {sys.executable} is {version}: see docs/install.md", file=sys.stderr)
    sys.exit(2)

# torch compiles into a folder in /tmp whose name anybody can take before, and runs what lies there. So it is put below
# the user's cache folder, where that can be written, before any script imports torch.
with contextlib.suppress(OSError, RuntimeError):  # no access, no home
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "torchinductor"
    if os.access(next(parent for parent in (folder, *folder.parents) if parent.exists()), os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
