# SPDX-License-Identifier: Apache-2.0
"""A critic without flash-attn and TRL: verl 0.9.1 loads it with FlashAttention 2 whatever the options say
(https://github.com/verl-project/verl/issues/5210), and looks for a class of TRL's that TRL 1 no longer has.

Every process of verl imports this at the end of `import verl` (VERL_USE_EXTERNAL_MODULES). A new version may not need it.
"""

from __future__ import annotations

from typing import Any

import verl.utils.import_utils
from transformers import AutoModelForTokenClassification, PreTrainedModel

# Before verl's other modules take the name from there.
verl.utils.import_utils.is_trl_available = lambda: False

import verl.utils.model  # noqa: E402


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
