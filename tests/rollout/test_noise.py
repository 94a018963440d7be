# SPDX-License-Identifier: Apache-2.0
"""Some rows, drawn alone, get the tokens that they get among all rows: from transformers' loop and from this project's."""

from __future__ import annotations

import pytest
import torch
from test_decode import DRAWN, NEW, policy  # noqa: F401
from test_prefill import GROUPS, asked

from grpo.rollout.decode import decode
from grpo.rollout.noise import SharedNoise


@pytest.mark.parametrize("way", [DRAWN, DRAWN | {"temperature": 1.3, "top_p": 0.6}], ids=["1", "0.6"])
@pytest.mark.parametrize("ours", [False, True])
def test_rows_alone_get_the_tokens_they_get_among_all(policy, way, ours):  # noqa: F811
    """Batch after batch: the second one's noise begins where that of the longest row of the first one ended."""
    model, options = (
        policy.get_base_model(),
        {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": [7, *range(20, 60)]},
    )
    inputs = asked(GROUPS)
    start = inputs["input_ids"].shape[1]

    def lengths(ids):
        return [
            1 + next((n for n, token in enumerate(row) if token in options["eos_token_id"]), NEW - 1) for row in ids
        ]

    torch.manual_seed(3)
    whole = [model.generate(**inputs, **options, **way, custom_generate=decode if ours else None) for _ in range(2)]
    parts, loop = [], decode if ours else type(model)._sample
    for own in (range(0, 1), range(1, 6), range(6, 6)):
        noise, found = SharedNoise(3, torch.device("cpu")), []
        for batch in whole:
            noise.begin(own, len(GROUPS))
            if own:
                mine = {name: tensor[own.start : own.stop] for name, tensor in inputs.items()}
                found.append(model.generate(**mine, **options, **way, custom_generate=noise.drawing(loop))[:, start:])
            noise.catch_up(max(lengths(batch[:, start:].tolist())), model.config.vocab_size)
        parts.append(found)
    for number, batch in enumerate(whole):
        expected = batch[:, start:].tolist()
        rows = [row for part in parts[:2] for row in part[number].tolist()]
        for mine, theirs, length in zip(rows, expected, lengths(expected), strict=True):
            assert mine[:length] == theirs[:length]
    assert len({tuple(row) for row in expected}) > 3 and min(lengths(expected)) < max(lengths(expected))
