# SPDX-License-Identifier: Apache-2.0
"""The resolver `${sum:...}` of scripts/verl/*.yaml, imported by every process of verl (VERL_USE_EXTERNAL_MODULES)."""

from omegaconf import OmegaConf

OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)
