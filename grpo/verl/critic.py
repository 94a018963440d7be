# SPDX-License-Identifier: Apache-2.0
"""A critic without flash-attn and TRL, imported by every process of verl (VERL_USE_EXTERNAL_MODULES).

verl 0.9.1 loads its critic with FlashAttention 2 whatever the options say, and looks for a class that TRL 1 no longer
has (https://github.com/verl-project/verl/issues/5210). A new version of verl may not need this.
"""

from typing import Any

import verl.utils.import_utils
from transformers import AutoModelForTokenClassification, PreTrainedModel

# This must come before verl's other modules import the name from there.
verl.utils.import_utils.is_trl_available = lambda: False

import verl.utils.model  # noqa: E402


def load_valuehead_model(
    local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> PreTrainedModel:
    """A model with a head of one value per token, and the attention that its configuration names."""
    options = {"attn_implementation": model_config._attn_implementation, "trust_remote_code": trust_remote_code}
    options |= {"dtype": torch_dtype, "config": model_config}
    return AutoModelForTokenClassification.from_pretrained(local_path, **options)


verl.utils.model.load_valuehead_model = load_valuehead_model
