# SPDX-License-Identifier: Apache-2.0
"""The rooms behind train_grpo.py, in the order in which a run passes through them: settings, data, tasks, run, preflight, model,
rollout, learn, evaluate, measure. A room imports only rooms that stand before it."""

from __future__ import annotations

from grpo.settings import keep_compiled_private

keep_compiled_private()  # whichever script it is: before torch can be imported
