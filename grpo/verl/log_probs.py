# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities without flash-attn, imported by every process of verl (VERL_USE_EXTERNAL_MODULES).

Without flash-attn verl 0.9.1 goes through packed rows in a Python loop with a log-softmax for each token, whose kernel
launches take longer than the passes of a small model. A new version of verl may not need this.
"""

import torch
import verl.utils.torch_functional
from torch import Tensor

CHUNK = 1024  # tokens whose log-softmax is computed at once, in float32: 0.5 GiB for a vocabulary of 128,256


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each label, in float32. `logits` (..., V), `labels` (...)."""
    chunks = zip(logits.flatten(0, -2).split(CHUNK), labels.flatten().split(CHUNK), strict=True)
    parts = [
        torch.log_softmax(rows, dim=-1, dtype=torch.float32).gather(-1, own.unsqueeze(-1)).squeeze(-1)
        for rows, own in chunks
    ]
    return torch.cat(parts).view(labels.shape)


# verl calls the loop by this name where flash-attn is missing.
verl.utils.torch_functional.logprobs_from_logits_v2 = logprobs_from_logits
