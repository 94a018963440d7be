# SPDX-License-Identifier: Apache-2.0
"""What crashes and disks do to a file."""

import hashlib
from collections.abc import Callable
from pathlib import Path


def flip_bit(path: Path) -> int:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    return path.write_bytes(content)


KINDS: dict[str, Callable[[Path], int]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "emptied": lambda path: path.write_bytes(b""),
    "one bit": flip_bit,
    "garbage": lambda path: path.write_bytes(hashlib.shake_128(b"garbage").digest(path.stat().st_size)),
}
