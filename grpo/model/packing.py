# SPDX-License-Identifier: Apache-2.0
"""Packs prompts and completions into dense rows, each prompt once for all of its completions."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.plan.memory import bucket

Tokens = Sequence[int]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Where the tokens of one micro-batch lie in memory, and what each of them attends to.

    R rows of T tokens are padded at their ends. A row holds groups one after the other. A group is a prompt and,
    behind it, its completions, each of which attends to the prompt and, causally, to itself, as if it stood alone.
    Kernels take a single row (R = 1) with keys gathered for each of S segments (a prompt or a completion); eager
    attention takes a mask."""

    ids: Tensor  # (R, T) int64
    positions: Tensor  # (R, T) int64, counted from the start of each group's prompt
    group: Tensor  # (R, T) int32, -1 for padding
    segment: Tensor  # (R, T) int32, 0 for the prompt, 1.. for its completions, -1 for padding
    queries: int  # real tokens of a single row, all at its front
    keys: Tensor  # (K,) int64: index of each gathered key
    cu_seqlens_q: Tensor  # (S + 1,) int32
    cu_seqlens_k: Tensor  # (S + 1,) int32
    max_seqlen_q: int
    max_seqlen_k: int
    state_index: Tensor  # (N,) int64: index of the hidden state that predicts each completion token
    targets: Tensor  # (N,) int64: the completion tokens
    rows: Tensor  # (N,) int64: the completion that each of these tokens belongs to
    columns: Tensor  # (N,) int64: its position in the completion


def pack_batch(
    prompts: Sequence[Tokens], completions: Sequence[Tokens], share: bool, one_row: bool, device: torch.device | str
) -> PackedBatch:
    """Pack completions, each with its prompt (both as token ids). With `share` the completions of equal prompts form a
    group. With `one_row` all groups are in one row, else each is a row of its own. Indices count through all rows."""
    groups: dict[Hashable, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else i, []).append(i)
    lines = [list(groups.values())] if one_row else [[members] for members in groups.values()]
    sizes = [sum(len(prompts[m[0]]) + sum(len(completions[i]) for i in m) for m in line) for line in lines]
    width = bucket(max(sizes))
    ids, positions = (torch.zeros(len(lines), width, dtype=torch.int64) for _ in range(2))
    group, segment = (torch.full((len(lines), width), -1, dtype=torch.int32) for _ in range(2))
    keys, state_index, rows, columns, lengths_q, lengths_k = [], [], [], [], [0], [0]
    for r, line in enumerate(lines):
        start = r * width
        for g, members in enumerate(line):
            prompt, prompt_start = prompts[members[0]], start
            for number, tokens in enumerate([prompt, *(completions[i] for i in members)]):
                offset = len(prompt) if number else 0
                index = torch.arange(start, start + len(tokens))
                ids.view(-1)[index] = torch.tensor(tokens, dtype=torch.int64)
                positions.view(-1)[index] = torch.arange(offset, offset + len(tokens))
                group.view(-1)[index], segment.view(-1)[index] = g, number
                keys += [torch.arange(prompt_start, prompt_start + offset), index]
                lengths_q.append(len(tokens))
                lengths_k.append(offset + len(tokens))
                if number:  # the prompt's last token predicts the completion's first
                    state_index.append(torch.cat([torch.tensor([prompt_start + offset - 1]), index])[: len(tokens)])
                    rows.append(torch.full((len(tokens),), members[number - 1]))
                    columns.append(torch.arange(len(tokens)))
                start += len(tokens)
    tensors = {"ids": ids, "positions": positions, "group": group, "segment": segment, "targets": ids[segment > 0]}
    lists = {"keys": keys, "state_index": state_index, "rows": rows, "columns": columns}
    tensors |= {name: torch.cat(parts) for name, parts in lists.items()}
    for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
        tensors[name] = torch.tensor(lengths).cumsum(0, dtype=torch.int32)
    tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return PackedBatch(queries=sizes[0], max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), **tensors)


def may_attend(batch: PackedBatch, window: int | None) -> Tensor:
    """(R, T, T) bool: which tokens each token attends to. Padding attends to padding: no row of scores may be empty."""
    group, segment, position = batch.group, batch.segment, batch.positions
    distance = position[:, :, None] - position[:, None, :]
    allowed = (group[:, :, None] == group[:, None, :]) & (distance >= 0)
    allowed &= (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    return allowed if window is None else allowed & (distance < window)


def cut_micro_batches(
    prompts: Sequence[Hashable], lengths: Sequence[tuple[int, int]], most_tokens: int, share: bool, one_row: bool
) -> list[list[int]]:
    """The indices of the completions in each micro-batch, which has at most `most_tokens` tokens or a single
    completion. `lengths` are (prompt, completion) in tokens. `share` and `one_row` are those of `pack_batch`. Padding
    counts where there are several rows: beside a long one, short ones take as much memory each."""
    cut: list[list[int]] = []
    row_tokens: dict[Hashable, int] = {}  # Of each row of the micro-batch.
    present = set[Hashable]()
    # Groups stay together, in the order of their first completions.
    first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
    for i in sorted(range(len(prompts)), key=lambda i: (first[prompts[i]], i)):
        prompt, completion = lengths[i]
        row = 0 if one_row else first[prompts[i]] if share else i
        need = completion + (0 if share and prompts[i] in present else prompt)
        tokens = row_tokens | {row: row_tokens.get(row, 0) + need}
        if not cut or max(tokens.values()) * len(tokens) > most_tokens:
            cut.append([])
            present, tokens = set(), {row: prompt + completion}
        cut[-1].append(i)
        row_tokens = tokens
        present.add(prompts[i])
    return cut


def padded_like(mask: Tensor, batch: PackedBatch, values: Tensor) -> Tensor:
    """`values` (N,) of the batch's completion tokens in the shape of `mask` (B, C), 0 for padding; differentiable."""
    return values.new_zeros(mask.shape).index_put((batch.rows, batch.columns), values)
