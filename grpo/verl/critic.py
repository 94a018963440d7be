# SPDX-License-Identifier: Apache-2.0
"""A critic without flash-attn: verl 0.9.1 loads it with FlashAttention 2 whatever the options say
(https://github.com/verl-project/verl/issues/5210).

Every process of verl imports this (VERL_USE_EXTERNAL_MODULES). A new version of verl may not need it.
"""

from __future__ import annotations

from typing import Any

import verl.utils.model
from transformers import AutoModelForTokenClassification, PreTrainedModel


def load_valuehead_model(
    local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> PreTrainedModel:
    """A model with a head of one value a token, and the attention that its configuration names. Raises what transformers
    raises for a model that it has no such head for."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


verl.utils.model.load_valuehead_model = load_valuehead_model
