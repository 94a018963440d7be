# SPDX-License-Identifier: Apache-2.0
"""Fixtures and hooks of all tests, where pytest looks for them."""

from helpers import (  # noqa: F401
    build,
    claimed_gpu,
    good_csv,
    hub,
    import_path,
    pytest_collection_modifyitems,
    quiet,
    saved_adapter,
    tiny,
)
