# SPDX-License-Identifier: Apache-2.0
"""Packing: what each token attends to, and how long rows get."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.model.packing import cut_micro_batches, may_attend, pack_batch
from grpo.plan.memory import bucket

pytestmark = pytest.mark.numeric

TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=3), st.data(), st.booleans(), st.booleans(), st.sampled_from([None, 1, 4]))
def test_every_token_sees_what_it_would_in_its_own_row(pool, data, share, one_row, window):
    """Brute force: the visible (token, position) pairs of every completion are those of prompt + completion alone, and
    the gathered keys of a kernel's segments are the same places as the mask's."""
    prompts = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=5))
    completions = [data.draw(st.lists(st.integers(10, 99), max_size=6)) for _ in prompts]
    batch = pack_batch(prompts, completions, share, one_row, "cpu")
    mask = may_attend(batch, window)
    width = batch.ids.shape[1]
    groups = len({tuple(p) for p in prompts}) if share else len(prompts)
    assert batch.ids.shape[0] == (1 if one_row else groups) and width == bucket(width)
    order = list(zip(batch.rows.tolist(), batch.columns.tolist(), strict=True))
    assert sorted(order) == [(i, c) for i, row in enumerate(completions) for c in range(len(row))]
    for place, target, (i, column) in zip(batch.state_index.tolist(), batch.targets.tolist(), order, strict=True):
        alone = prompts[i] + completions[i]
        at = len(prompts[i]) + column - 1  # place of the predicting token in its own row
        assert target == alone[at + 1]
        r, c = divmod(place, width)
        assert batch.ids[r, c] == alone[at] and batch.positions[r, c] == at
        seen = mask[r, c].nonzero().flatten()
        pairs = sorted((batch.positions[r, j].item(), batch.ids[r, j].item()) for j in seen)
        assert pairs == [(j, alone[j]) for j in range(at + 1) if window is None or at - j < window]
    padding = batch.segment < 0
    stored = {tuple(p): len(p) for p in prompts}.values() if share else map(len, prompts)
    assert (~padding).sum() == sum(stored) + len(order)
    assert mask.any(-1).all(), "no row of scores is empty"
    assert not (mask & (padding[:, :, None] != padding[:, None, :])).any()
    if one_row:
        kernel = torch.zeros(batch.queries, width, dtype=torch.bool)
        starts, key_starts = batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()
        assert starts[-1] == batch.queries == int((~padding).sum()) and key_starts[-1] == len(batch.keys)
        for s in range(len(starts) - 1):
            keys, n = batch.keys[key_starts[s] : key_starts[s + 1]], starts[s + 1] - starts[s]
            assert n <= batch.max_seqlen_q and len(keys) <= batch.max_seqlen_k
            for row in range(n):
                last = len(keys) - n + row
                kernel[starts[s] + row, keys[max(0, last + 1 - (window or width)) : last + 1]] = True
        assert torch.equal(kernel, mask[0, : batch.queries])


@pytest.mark.parametrize(
    ("most_tokens", "share", "cut"),
    [(20, True, [[0, 2], [1]]), (34, True, [[0, 2], [1]]), (35, True, [[0, 2, 1]]), (29, False, [[0], [2], [1]]),
     (30, False, [[0, 2], [1]]), (3, True, [[0], [2], [1]])],
)  # fmt: skip
def test_micro_batches_hold_as_many_tokens_as_fit(most_tokens, share, cut):
    """Equal prompts stay together; a completion that alone is too long has a micro-batch of its own."""
    assert cut_micro_batches("aba", [(10, 5)] * 3, most_tokens, share, True) == cut


@pytest.mark.parametrize(
    ("most_tokens", "share", "one_row", "cut"),
    [(40, False, False, [[0], [1, 2, 3]]), (79, False, True, [[0, 1, 2, 3]]), (79, False, False, [[0], [1, 2, 3]]),
     (80, False, False, [[0, 1], [2, 3]]), (159, False, False, [[0, 1, 2], [3]]), (160, False, False, [[0, 1, 2, 3]]),
     (69, True, True, [[0, 1, 2, 3]]), (85, True, False, [[0, 1], [2, 3]]), (86, True, False, [[0, 1, 2, 3]])],
)  # fmt: skip
def test_padding_counts_where_there_are_several_rows(most_tokens, share, one_row, cut):
    """A row is as long as the longest: one completion of 30 tokens and three of 3, each behind a prompt of 10. Those of
    equal prompts share it: rows of 43 and 16 tokens."""
    assert cut_micro_batches("aabb", [(10, 30), (10, 3), (10, 3), (10, 3)], most_tokens, share, one_row) == cut
