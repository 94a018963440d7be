# SPDX-License-Identifier: Apache-2.0
"""Completions that share a prompt, packed into dense rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo.preflight.memory import bucket


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of one pass lie in memory, and what each of them attends to.

    R rows of T tokens, padded at their ends. A row holds groups one after the other; a group is a prompt and, behind it,
    its completions: each of them attends to the prompt and, causally, to itself, as if it stood alone. Kernels take a
    single row (R = 1) with keys gathered for each segment (a prompt or a completion); eager and flex attention a mask.
    """

    ids: Any  # (R, T) int64
    positions: Any  # (R, T) int64, counted from the group's start of each prompt
    group: Any  # (R, T) int32, -1 for padding
    segment: Any  # (R, T) int32, 0 for the prompt, 1.. for its completions, -1 for padding
    queries: int  # real tokens of a single row, all at its front
    keys: Any  # (K,) int64: place of each gathered key
    query_starts: Any  # (S + 1,) int32
    key_starts: Any  # (S + 1,) int32
    longest_query: int
    longest_key: int
    before: Any  # (N,) int64: place of the state that predicts each completion token
    targets: Any  # (N,) int64: those tokens
    rows: Any  # (N,) int64: the completion that each of them belongs to
    columns: Any  # (N,) int64: its place in the completion


def make_layout(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], share: bool, one_row: bool, device: Any
) -> Layout:
    """The layout of some completions, each with its prompt (both as token ids): equal prompts stand there once if they
    `share`; all groups stand in one row, or each in a row of its own."""

    groups: dict[Any, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else i, []).append(i)
    lines = [list(groups.values())] if one_row else [[members] for members in groups.values()]
    sizes = [sum(len(prompts[m[0]]) + sum(len(completions[i]) for i in m) for m in line) for line in lines]
    width = bucket(max(sizes))
    shape = (len(lines), width)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    group, segment = (torch.full(shape, -1, dtype=torch.int32) for _ in range(2))
    keys, starts, key_starts, longest, longest_key = [], [0], [0], 0, 0
    before, targets, rows, columns = [], [], [], []
    for r, line in enumerate(lines):
        at = 0
        for g, members in enumerate(line):
            prompt = prompts[members[0]]
            first = r * width + at
            for number, i in enumerate([None, *members]):
                tokens = prompt if i is None else completions[i]
                place = slice(at, at + len(tokens))
                ids[r, place] = torch.tensor(tokens, dtype=torch.int64)
                offset = 0 if i is None else len(prompt)
                positions[r, place] = torch.arange(offset, offset + len(tokens))
                group[r, place], segment[r, place] = g, number
                own = torch.arange(r * width + at, r * width + at + len(tokens))
                if i is not None:
                    keys.append(torch.arange(first, first + len(prompt)))
                    before.append(torch.cat([own.new_tensor([first + len(prompt) - 1]), own])[: len(tokens)])
                    targets.append(ids[r, place])
                    rows.append(torch.full((len(tokens),), i))
                    columns.append(torch.arange(len(tokens)))
                keys.append(own)
                at += len(tokens)
                starts.append(starts[-1] + len(tokens))
                key_starts.append(key_starts[-1] + offset + len(tokens))
                longest, longest_key = max(longest, len(tokens)), max(longest_key, offset + len(tokens))

    def put(tensor: Any) -> Any:
        return tensor.to(device, non_blocking=True)

    return Layout(
        put(ids), put(positions), put(group), put(segment), sizes[0], put(torch.cat(keys)),
        put(torch.tensor(starts, dtype=torch.int32)), put(torch.tensor(key_starts, dtype=torch.int32)), longest,
        longest_key, put(torch.cat(before)), put(torch.cat(targets)), put(torch.cat(rows)), put(torch.cat(columns)),
    )  # fmt: skip


def may_attend(layout: Layout, window: int | None) -> Any:
    """(R, T, T) bool: what each token attends to. Padding attends to padding, so that no row of scores is empty."""
    group, segment, position = layout.group, layout.segment, layout.positions
    distance = position[:, :, None] - position[:, None, :]
    allowed = (group[:, :, None] == group[:, None, :]) & (distance >= 0)
    allowed &= (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    return allowed if window is None else allowed & (distance < window)


def cut_passes(
    prompts: Sequence[Any], lengths: Sequence[tuple[int, int]], most_tokens: int, share: bool
) -> list[list[int]]:
    """Which completions go through the model together: indices by pass, at most `most_tokens` tokens in each (or a single
    completion that has more). `lengths` are those of prompt and completion; equal `prompts` are computed once a pass if
    they `share`.

    >>> cut_passes("aab", [(10, 5), (10, 5), (10, 5)], most_tokens=20, share=True)
    [[0, 1], [2]]
    """
    passes: list[list[int]] = []
    used, present = 0, set()
    # Groups stay together, in the order of their first completions.
    first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
    for i in sorted(range(len(prompts)), key=lambda i: (first[prompts[i]], i)):
        prompt, completion = lengths[i]
        need = completion + (0 if share and prompts[i] in present else prompt)
        if not passes or used + need > most_tokens:
            passes.append([])
            used, present, need = 0, set(), prompt + completion
        passes[-1].append(i)
        used += need
        present.add(prompts[i])
    return passes


def padded_like(mask: Any, layout: Layout, values: Any) -> Any:
    """`values` (N,) of the layout's completion tokens as (b, C), zero beyond each completion; differentiable."""
    return values.new_zeros(mask.shape).index_put((layout.rows, layout.columns), values)
