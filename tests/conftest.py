# SPDX-License-Identifier: Apache-2.0
"""Fixtures and hooks of all tests, where pytest looks for them."""

from helpers import *  # noqa: F403
