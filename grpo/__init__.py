# SPDX-License-Identifier: Apache-2.0
"""The rooms behind train_grpo.py, in the order in which a run passes through them: settings, data, tasks, run, preflight, model,
rollout, learn, evaluate, measure. A room imports only rooms that stand before it."""
