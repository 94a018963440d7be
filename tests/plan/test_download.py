# SPDX-License-Identifier: Apache-2.0
"""Models from a Hub: what is asked for, and what is said."""

import json
from pathlib import Path

import pytest
from hub_server import STRANGER, TOKEN, files_in
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from machines import only

from grpo.common import Problems
from grpo.plan.hub import download_problem, fetch_weights, find_model
from grpo.plan.tensors import listed_tensors

MODEL = "org/model"
PARTS = ("model-1.safetensors", "model-2.safetensors")


def files_of(tiny: Path) -> dict[str, bytes]:
    """A repository as the official one is: weights in parts, and twice more in other forms."""
    files = {name: content for name, content in files_in(tiny).items() if name != "model.safetensors"}
    names = sorted(listed_tensors(tiny))
    index = {"weight_map": {name: PARTS[number % 2] for number, name in enumerate(names)}}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), PARTS[0]: b"one", PARTS[1]: b"two"}
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
    assert hub.fetched() == sorted(needed)
    assert all((folder / name).read_bytes() == files[name] for name in needed)
    hub.add(MODEL, files | {"README.md": b"a new commit, the same weights"})
    assert fetch()[0] != folder and hub.fetched() == sorted(needed)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert not fetch()[1] and not hub.asked, "offline, from the cache"


REFUSED = [
    ({"name": "org/other"}, "", "Invalid username or password"),
    ({"private": True}, "", "Invalid username or password"),
    ({"gated": True}, STRANGER, "Cannot access gated repo"),
    ({}, "hf_mistyped", "Invalid credentials"),
]


@pytest.mark.parametrize(("repo", "token", "words"), REFUSED)
def test_a_refusal_says_in_one_line_what_to_do(hub, tiny, monkeypatch, repo, token, words):
    hub.add(**{"name": MODEL, "files": files_of(tiny)} | repo)
    monkeypatch.setenv("HF_TOKEN", token)
    _, problems = fetch()
    assert words in only(problems) and "`hf auth login`" in problems[0] and "\n" not in problems[0]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert bool(fetch()[1]) == ("name" in repo), "with the right token there is none"


def test_a_run_stays_with_its_commit(hub, tiny, tmp_path, monkeypatch):
    """A newer one is not asked for. Where the old one is neither in the cache nor on the Hub, the run is refused."""
    files = files_of(tiny)
    hub.add(MODEL, files)
    commit = find_model(MODEL, Problems()).commit
    assert commit == hub.repos["models", MODEL].commit and find_model(str(tiny), Problems()).commit is None
    hub.add(MODEL, files | {"config.json": files["config.json"] + b"\n", PARTS[0]: b"new"})
    assert find_model(MODEL, Problems()).commit == hub.repos["models", MODEL].commit != commit
    continued = find_model(MODEL, Problems(), commit)
    assert continued.commit == commit and (continued.folder / "config.json").read_bytes() == files["config.json"]
    assert not fetch_weights(MODEL, continued) and (continued.folder / PARTS[0]).read_bytes() == b"one"
    for folder in ("hub", "elsewhere"):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / folder))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", folder == "hub")
        assert find_model(MODEL, problems := Problems(), commit).commit == commit and not problems
    del hub.commits[commit]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "new"))
    assert find_model(MODEL, problems := Problems(), commit) is None
    begun = f"MODEL_ID: the run began with commit {commit} and uses no other, and {MODEL} is not in the cache"
    assert begun in only(problems)
    assert problems[0].endswith("A new OUTPUT_DIR begins with the newest commit")


def test_misnamed_weights_are_refused_before_they_are_fetched(hub, tiny):
    """As those of a model whose experts were taken apart into linear modules."""
    files = files_of(tiny)
    index = json.loads(files["model.safetensors.index.json"])
    part = index["weight_map"].pop("model.layers.1.mlp.experts.down_proj_blocks")
    index["weight_map"] |= {f"model.layers.1.mlp.experts.down_projs.{n}.weight": part for n in range(4)}
    hub.add(MODEL, files | {"model.safetensors.index.json": json.dumps(index).encode()})
    find_model(MODEL, problems := Problems())
    fault = "its weights lack model.layers.1.mlp.experts.down_proj_blocks and hold 4 tensors (model.layers.1.mlp."
    assert fault in only(problems) and "MODEL_ID=openai/gpt-oss-20b" in problems[0]
    assert not set(PARTS) & set(hub.fetched())


def test_weights_that_cannot_come_are_told_the_same_way(hub, tiny, monkeypatch):
    """The small files are there, and then no network is wanted."""
    hub.add(MODEL, files_of(tiny))
    find_model(MODEL, Problems())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = only(fetch()[1])
    assert f"{MODEL} is not in the cache and cannot be fetched (" in problem and "HF_HUB_OFFLINE" in problem
    assert "\n" not in problem
    error = LocalEntryNotFoundError("Look at your connection.")
    error.__cause__ = OSError("No route to host")
    assert download_problem(MODEL, error)[0].endswith("(No route to host)")
