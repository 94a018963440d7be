# SPDX-License-Identifier: Apache-2.0
"""From the Hub to its cache: large files that go on where they stopped, and refusals in one line."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from grpo.plan.machine import GIB

PARTIAL = ".partial"  # The end of a file's name in the cache until it is whole.
REPORT_S = 30.0  # Seconds between two lines about a download.
FILES_AT_ONCE = 4


def refusal(model_id: str, error: BaseException) -> tuple[str, str]:
    """Why a Hub model's files did not come, given what was raised, and what to do about it: a line each."""
    fault, other = f"{model_id} is not in the cache and cannot be fetched", "set MODEL_ID to a local folder or to tiny"
    try:
        from huggingface_hub import constants, errors, get_token
    except ImportError:  # `check_packages` names it.
        return f"{fault} ({error})", "Install huggingface_hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if constants.HF_HUB_OFFLINE:
        return f"{fault} (HF_HUB_OFFLINE is set)", f"Unset it, or {other}"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model_id}"
        return f"{fault} (it is gated)", f"Accept its licence at {page}, then run `hf auth login` or set HF_TOKEN"
    # Without a token the Hub answers 401 to a name that it does not have, too.
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not get_token()):
        reason = f"{constants.ENDPOINT} has no model of that name, or it is private"
        return f"{fault} ({reason})", "Check the name; for a private one run `hf auth login` or set HF_TOKEN"
    if status in (401, 403):
        fix = "Run `hf auth login`, or set HF_TOKEN (which comes first where both are there) to one that may read it"
        return f"{fault} ({constants.ENDPOINT} refuses the token)", fix
    fix = f"Check the network, HF_ENDPOINT and the disk, then the same command goes on where it stopped; or {other}"
    if isinstance(error, errors.LocalEntryNotFoundError):  # Its own message is five lines around that of its cause.
        error = error.__cause__ or error
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{fault} ({constants.ENDPOINT}: {reason})", fix


def download(model_id: str, snapshot: Path, names: Sequence[str]) -> None:
    """Bring the files `names` of a Hub model into its `snapshot` folder in the cache, with a line every REPORT_S.

    Raises what huggingface_hub raises, and OSError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    started, urls = time.monotonic(), [hf_hub_url(model_id, name, revision=snapshot.name) for name in names]
    files = [get_hf_file_metadata(url) for url in urls]
    blobs = [snapshot.parents[1] / "blobs" / str(file.etag) for file in files]
    total = sum(file.size or 0 for file in files) / GIB

    def report(verb: str) -> None:
        done = 0.0
        for path in (path for blob in blobs for path in (blob, partial(blob))):
            with contextlib.suppress(OSError):  # It is not there, or was renamed just now.
                done += path.stat().st_size / GIB
        print(f"{verb} {model_id}: {done:.2f} of {total:.2f} GiB, {time.monotonic() - started:.0f} s", flush=True)

    report("downloading")
    pool = ThreadPool(FILES_AT_ONCE)  # Its threads are daemons: Ctrl-C waits for none of them.
    work = pool.starmap_async(fetch_file, zip(urls, blobs, (file.size for file in files), strict=True), chunksize=1)
    pool.close()  # The threads end with their work.
    while not work.ready():
        work.wait(REPORT_S)
        report("downloaded")
    work.get()
    for name in names:  # This makes the link in the snapshot.
        hf_hub_download(model_id, name, revision=snapshot.name)


def partial(blob: Path) -> Path:
    """Where a file of the cache is until it is whole."""
    return blob.with_name(blob.name + PARTIAL)


def fetch_file(url: str, blob: Path, size: int | None) -> None:
    """Brings a file of the Hub to its place in the cache, from where an earlier try stopped. huggingface_hub resumes
    within a process only: when one ends, it deletes what came, or leaves it under a name that it never looks for."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    part = partial(blob)
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"  # This is huggingface_hub's own.
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # Another process brought it.
            return
        with part.open("ab") as file:
            if size is not None and file.tell() > size:
                file.truncate(0)
                file.seek(0)
            http_get(url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=size)
        if size not in (None, part.stat().st_size):  # This happens on a disk whose locks do not hold.
            raise OSError(f"another process wrote to {part} too")
        os.replace(part, blob)
