# SPDX-License-Identifier: Apache-2.0
"""Models from a Hub: what is asked for, what goes on after a break, what is said."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CLEAN, ROOT
from hub_server import STRANGER, TOKEN, HubServer, etag, files_in
from huggingface_hub import close_session, constants
from machines import only
from runs import wait_until

from grpo.plan import download
from grpo.plan.hub import checkpoint_gib, downloaded_gib, fetch_weights, find_model
from grpo.plan.machine import GIB
from grpo.settings import Problems

MODEL = "org/model"
BIG = bytes(range(256)) * 2**12 * 12  # 12 MiB: huggingface_hub writes 10 at a time
PARTS = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that huggingface_hub uses in this process, with a cache of its own and no token."""
    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        close_session()
        yield hub
        close_session()


def files_of(tiny: Path, first: bytes = b"one", second: bytes = b"two") -> dict[str, bytes]:
    """A repository as the official one is: weights in parts, and twice more in other forms."""
    files = {name: content for name, content in files_in(tiny).items() if name != "model.safetensors"}
    index = {"weight_map": {"a": PARTS[0], "b": PARTS[1], "c": PARTS[1]}}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), PARTS[0]: first, PARTS[1]: second}
    others = ("original/model.safetensors", "metal/model.bin", "model-old.safetensors", "README.md")
    return files | dict.fromkeys(others, b"not to be asked for")


def fetch() -> tuple[Path | None, list[str]]:
    """The model's folder, and the problems."""
    problems = Problems()
    files = find_model(MODEL, problems)
    if files and (problem := fetch_weights(MODEL, files)):
        problems.append(problem)
    return files and files.folder, problems


def test_only_what_is_needed_is_asked_for_and_once(hub, tiny, monkeypatch):
    files = files_of(tiny)
    hub.add(MODEL, files)
    folder, problems = fetch()
    assert not problems
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    needed = {*small, "model.safetensors.index.json", *PARTS}
    assert hub.fetched() == dict.fromkeys(needed, [""])
    assert all((folder / name).read_bytes() == files[name] for name in needed)
    hub.add(MODEL, files | {"README.md": b"a new commit, the same weights"})
    assert fetch()[0] != folder and hub.fetched() == dict.fromkeys(needed, [""])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert not fetch()[1] and not hub.asked, "offline, from the cache"


def test_a_broken_connection_is_resumed_and_progress_is_reported(hub, tiny, monkeypatch, capsys):
    monkeypatch.setattr(download, "REPORT_S", 0.05)
    hub.add(MODEL, files_of(tiny, BIG))
    hub.cut[PARTS[0]] = 11 * 2**20
    folder, problems = fetch()
    assert not problems and (folder / PARTS[0]).read_bytes() == BIG
    assert hub.fetched()[PARTS[0]] == ["", f"bytes={10 * 2**20}-"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"downloading {MODEL}: 0.00 of 0.01 GiB") and len(lines) > 3
    assert ": 0.01 of 0.01 GiB" in lines[-1]


def test_a_second_start_goes_on_where_ctrl_c_stopped_the_first(hub, tiny, tmp_path):
    hub.add(MODEL, files_of(tiny, BIG))
    hub.pause = 0.01
    code = (
        "from grpo.plan.hub import *; problems = Problems(); "
        f"fetch_weights({MODEL!r}, find_model({MODEL!r}, problems)); print(problems)"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=CLEAN | hub.environ(tmp_path), cwd=ROOT, **streams)
    blobs = tmp_path / "hub/models--org--model/blobs"
    wait_until(lambda: sum(path.stat().st_size for path in blobs.glob("*.partial")) >= 10 * 2**20, process)
    process.send_signal(signal.SIGINT)
    process.wait()
    there = next(path.stat().st_size for path in blobs.glob("*.partial") if path.stat().st_size)
    hub.pause = 0
    folder, problems = fetch()
    assert not problems and 0 < there < len(BIG) and (folder / PARTS[0]).read_bytes() == BIG
    assert hub.fetched()[PARTS[0]] == ["", f"bytes={there}-"] and hub.fetched()[PARTS[1]] == [""]
    assert not list(blobs.glob("*.partial"))


def test_what_came_in_part_counts_and_too_much_is_thrown_away(hub, tiny):
    hub.add(MODEL, files_of(tiny))
    files = find_model(MODEL, Problems())
    blobs = files.folder.parents[1] / "blobs"
    download.partial(blobs / etag(b"one")).write_bytes(b"longer than it should be")
    assert downloaded_gib(files) == 24 / GIB and checkpoint_gib(MODEL, files) == 12.9
    assert fetch_weights(MODEL, files) is None and (files.folder / PARTS[0]).read_bytes() == b"one"
    assert checkpoint_gib(MODEL, files) == 6 / GIB


REFUSED = [
    ({"name": "org/other"}, "", "has no model of that name, or it is private). Check the name"),
    ({"private": True}, "", "for a private one run `hf auth login` or set HF_TOKEN"),
    ({"gated": True}, STRANGER, "Accept its licence at {url}/org/model, then run `hf auth login`"),
    ({}, "hf_mistyped", "{url} refuses the token). Run `hf auth login`"),
]


@pytest.mark.parametrize(("repo", "token", "words"), REFUSED)
def test_a_refusal_says_in_one_line_what_to_do(hub, tiny, monkeypatch, repo, token, words):
    hub.add(**{"name": MODEL, "files": files_of(tiny)} | repo)
    monkeypatch.setenv("HF_TOKEN", token)
    _, problems = fetch()
    assert words.format(url=hub.url) in only(problems) and "\n" not in only(problems)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert bool(fetch()[1]) == ("name" in repo), "with the right token there is none"


def test_weights_that_cannot_come_are_told_the_same_way(hub, tiny, monkeypatch):
    """The small files are there: no network, then offline."""
    hub.add(MODEL, files_of(tiny))
    find_model(MODEL, Problems())
    hub.__exit__()
    close_session()  # a connection would still be served
    problem = only(fetch()[1])
    refused = f"({hub.url}: [Errno {errno.ECONNREFUSED}] Connection refused). Check the network"
    assert refused in problem and "\n" not in problem
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert only(fetch()[1]).endswith("(HF_HUB_OFFLINE is set). Unset it, or set MODEL_ID to a local folder or to tiny")
