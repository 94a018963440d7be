# SPDX-License-Identifier: Apache-2.0
"""The source of the vLLM that requirements.txt pins, for the tests that read it. Nothing is installed.

python tests/vllm_source.py    # downloads 290 MiB once and keeps 33 MB of it, the .py files, in the user's cache
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Of the wheel below. A new version in requirements.txt needs a new one: `pip hash` prints it.
SHA256 = "adb1e4c9b46d0dfdb094121ae5aad670a42412dd813ed4e5db069ed6a15006de"
# The .py files are the same for every processor; the source distribution would lack triton_kernels.
WHEEL = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--only-binary", ":all:", "--no-deps"]


def pinned_version() -> str:
    """vLLM's version in requirements.txt."""
    root = next(folder for folder in Path(__file__).resolve().parents if (folder / "requirements.txt").is_file())
    return re.search(r"^vllm==(\S+)", (root / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]


def cached_source() -> Path:
    """The folder that `fetch` makes: ``$XDG_CACHE_HOME/train_grpo/vllm-<version>-<hash>``, or under ``~/.cache``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    return base / "train_grpo" / f"vllm-{pinned_version()}-{SHA256[:12]}"


def fetch() -> Path:
    """The cached source, downloaded first if it is missing. Raises OSError without the wheel of `SHA256`."""
    target = cached_source()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # The scratch folder is in the cache's file system, so that the target appears there whole or not at all.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        requirement = Path(scratch, "vllm.txt")
        requirement.write_text(f"vllm=={pinned_version()} --hash=sha256:{SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", *WHEEL]
        if subprocess.run([*command, "--dest", scratch, "--requirement", str(requirement)]).returncode:
            raise OSError("pip could not download vLLM's wheel, or its hash is another (pip's message is above)")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.endswith(".py")])
        Path(scratch, "vllm").rename(target)
    return target


if __name__ == "__main__":
    try:
        print(fetch())
    except OSError as error:
        sys.exit(str(error))
