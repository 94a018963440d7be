# SPDX-License-Identifier: Apache-2.0
"""Packing: prompts and completions in dense rows, each prompt once for all of its completions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from grpo.plan.memory import bucket


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """How the tokens of one micro-batch lie in memory, and what each of them attends to.

    R rows of T tokens, padded at their ends. A row holds groups one after the other; a group is a prompt and, behind it,
    its completions: each of them attends to the prompt and, causally, to itself, as if it stood alone. Kernels take a
    single row (R = 1) with keys gathered for each of S segments (a prompt or a completion); eager attention a mask.
    """

    ids: torch.Tensor  # (R, T) int64
    positions: torch.Tensor  # (R, T) int64, counted from the group's start of each prompt
    group: torch.Tensor  # (R, T) int32, -1 for padding
    segment: torch.Tensor  # (R, T) int32, 0 for the prompt, 1.. for its completions, -1 for padding
    queries: int  # real tokens of a single row, all at its front
    keys: torch.Tensor  # (K,) int64: index of each gathered key
    cu_seqlens_q: torch.Tensor  # (S + 1,) int32
    cu_seqlens_k: torch.Tensor  # (S + 1,) int32
    max_seqlen_q: int
    max_seqlen_k: int
    before: torch.Tensor  # (N,) int64: index of the state that predicts each completion token
    targets: torch.Tensor  # (N,) int64: those tokens
    rows: torch.Tensor  # (N,) int64: the completion that each of them belongs to
    columns: torch.Tensor  # (N,) int64: its place in the completion


Tokens = Sequence[int]


def pack_batch(
    prompts: Sequence[Tokens], completions: Sequence[Tokens], share: bool, one_row: bool, device: torch.device | str
) -> PackedBatch:
    """Pack some completions, each with its prompt (both as token ids): equal prompts stand there once if they `share`;
    all groups stand in one row, or each in a row of its own. Indices count through all rows."""
    groups: dict[Hashable, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else i, []).append(i)
    lines = [list(groups.values())] if one_row else [[members] for members in groups.values()]
    sizes = [sum(len(prompts[m[0]]) + sum(len(completions[i]) for i in m) for m in line) for line in lines]
    width = bucket(max(sizes))
    ids, positions = (torch.zeros(len(lines), width, dtype=torch.int64) for _ in range(2))
    group, segment = (torch.full((len(lines), width), -1, dtype=torch.int32) for _ in range(2))
    keys, before, rows, columns, lengths_q, lengths_k = [], [], [], [], [0], [0]
    for r, line in enumerate(lines):
        at = 0  # within the row
        for g, members in enumerate(line):
            first = r * width + at
            for number, i in enumerate([None, *members]):
                tokens, offset = (prompts[members[0]], 0) if i is None else (completions[i], len(prompts[i]))
                n, start = len(tokens), r * width + at
                here, own = slice(at, at + n), torch.arange(start, start + n)
                ids[r, here] = torch.tensor(tokens, dtype=torch.int64)
                positions[r, here] = torch.arange(offset, offset + n)
                group[r, here], segment[r, here] = g, number
                keys += [torch.arange(first, first + offset), own]
                lengths_q.append(n)
                lengths_k.append(offset + n)
                if i is not None:  # the prompt's last token predicts the completion's first
                    before.append(torch.cat([torch.tensor([first + offset - 1]), own])[:n])
                    rows.append(torch.full((n,), i))
                    columns.append(torch.arange(n))
                at += n
    tensors = {"ids": ids, "positions": positions, "group": group, "segment": segment, "targets": ids[segment > 0]}
    lists = {"keys": keys, "before": before, "rows": rows, "columns": columns}
    tensors |= {name: torch.cat(parts) for name, parts in lists.items()}
    for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
        tensors[name] = torch.tensor(lengths).cumsum(0, dtype=torch.int32)
    tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return PackedBatch(queries=sizes[0], max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), **tensors)


def may_attend(batch: PackedBatch, window: int | None) -> torch.Tensor:
    """(R, T, T) bool: what each token attends to. Padding attends to padding, so that no row of scores is empty."""
    group, segment, position = batch.group, batch.segment, batch.positions
    distance = position[:, :, None] - position[:, None, :]
    allowed = (group[:, :, None] == group[:, None, :]) & (distance >= 0)
    allowed &= (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    return allowed if window is None else allowed & (distance < window)


def cut_micro_batches(
    prompts: Sequence[Hashable], lengths: Sequence[tuple[int, int]], most_tokens: int, share: bool
) -> list[list[int]]:
    """Which completions go through the model together: their indices by micro-batch, at most `most_tokens` tokens in each
    (or a single completion that has more). `lengths` are those of prompt and completion; equal `prompts` are computed once
    a micro-batch if they `share`.

    >>> cut_micro_batches("aab", [(10, 5), (10, 5), (10, 5)], most_tokens=20, share=True)
    [[0, 1], [2]]
    """
    cut: list[list[int]] = []
    used, present = 0, set()
    # Groups stay together, in the order of their first completions.
    first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
    for i in sorted(range(len(prompts)), key=lambda i: (first[prompts[i]], i)):
        prompt, completion = lengths[i]
        need = completion + (0 if share and prompts[i] in present else prompt)
        if not cut or used + need > most_tokens:
            cut.append([])
            used, present, need = 0, set(), prompt + completion
        cut[-1].append(i)
        used += need
        present.add(prompts[i])
    return cut


def padded_like(mask: torch.Tensor, batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """`values` (N,) of the batch's completion tokens as (B, C), zero beyond each completion; differentiable."""
    return values.new_zeros(mask.shape).index_put((batch.rows, batch.columns), values)
