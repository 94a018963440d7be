# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: rows written as CSVs, and the real entry point run as a subprocess."""

import contextlib
import csv
import functools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hub_server import HubServer

from grpo.common import log
from grpo.plan.hub import TINY_PATH

# What every conftest.py takes from here: fixtures and a hook.
__all__ = [
    "build", "claimed_gpu", "compiler", "forked_description", "good_csv", "hub", "import_path",
    "pytest_collection_modifyitems", "quiet", "saved_adapter", "tiny",
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_grpo.py"
# Variables that a test run inherits: nothing that could be a setting.
CLEAN = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "TMPDIR") if name in os.environ}
CLEAN |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
# More threads than free cores make the tiny model's many small operations wait for each other.
CLEAN |= {"OMP_NUM_THREADS": "1"}

os.environ.pop("MODEL_ID", None)  # It would replace the base model that an adapter names.
# A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

RENDERED = "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>{}<|end|><|start|>assistant"
# A prompt of the plant that the tiny model was made for, as arguments of scripts/ask.py.
QUESTION = "hour 8 store 50 load 26 co2 26 next 34 gain 58 short 0 room 100 need 0 rank 0 ahead 31 loads 27"
SYSTEM = ("--system", "Answer with one action: [0] [1] [2] [3].")


def run_python(
    *arguments: object, code: int | None = 0, cwd: Path = ROOT, **environ: object
) -> subprocess.CompletedProcess:
    """Python with these arguments and variables, which must end with this exit code. pytest's own limit ends it."""
    variables = CLEAN | {name: str(value) for name, value in environ.items()}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True)
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


# `python train_grpo.py` as a user runs it, with settings in the environment.
run_script = functools.partial(run_python, SCRIPT)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_commands(folder: Path, commands: Mapping[str, str]) -> Path:
    """A folder for the front of PATH with these programs, which are Bash without a line that says otherwise."""
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files first whose few tests take longest, because they start whole runs. Each file goes to the next free
    one of two workers: at the end neither waits long for the other."""
    items.sort(key=lambda item: item.path.parent.name not in ("process", "output", "evaluate", "learn"))


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Takes out what `load_reward` adds: the next test's module of the same name would not be read otherwise."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = set(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
            del sys.modules[name]


@pytest.fixture
def build(tiny: Path, tmp_path: Path) -> Callable:
    """Builds trainers with a stub of vLLM beside them."""
    from engines import trainer_with_engine  # late: most tests need no torch

    return functools.partial(trainer_with_engine, tiny, tmp_path)


@pytest.fixture
def good_csv(tmp_path: Path) -> Path:
    """Twelve valid rows with two actions, rendered prompts and a column of the user's own."""
    rows = [[RENDERED.format(f"question {i}"), i / 20, 1 - i / 20, f"note {i}"] for i in range(12)]
    return write_csv(tmp_path / "good.csv", ["prompt", "reward_action_0", "reward_action_1", "note"], rows)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The folder of the tiny model."""
    return TINY_PATH


@pytest.fixture(scope="session")
def saved_adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh LoRA of rank 3 and alpha 5 on q and v of the tiny model, as PEFT saves it. Not to be written to."""
    from expert_models import load  # late: most tests need no torch
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter") / "saved"
    lora = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(load(tiny), lora).save_pretrained(str(folder))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that huggingface_hub uses in this process, with a cache of its own and no token."""
    from huggingface_hub import close_session, constants  # late: it reads its variables when it is imported

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


@contextlib.contextmanager
def quietly() -> Iterator[Callable[[], None]]:
    """Puts back what a run changes in its process; a call closes the logs that were opened so far."""
    root, trl = logging.getLogger(), logging.getLogger("trl.trainer.grpo_trainer")
    handlers, level, filters, own = list(root.handlers), root.level, list(trl.filters), log.level
    signals = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def close_logs() -> None:
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # /dev/full
                handler.close()

    yield close_logs
    close_logs()
    root.setLevel(level)
    log.setLevel(own)
    trl.filters[:] = filters
    logging.captureWarnings(False)
    for name, handler in signals.items():
        signal.signal(name, handler)


@pytest.fixture
def quiet() -> Iterator[Callable[[], None]]:
    with quietly() as close_logs:
        yield close_logs


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that tests pretend to have can compile, whatever this one has."""
    monkeypatch.setattr("grpo.plan.machine.compiler_fault", lambda: "")


@pytest.fixture
def forked_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of environments are described in forks of this process: a new one imports transformers for seconds."""
    import transformers.utils.chat_template_utils  # noqa: F401, what a description needs

    from grpo.environment import pool

    spawn = pool.spawn
    monkeypatch.setattr(pool, "spawn", lambda method, name: spawn("fork" if method == "spawn" else method, name))


@pytest.fixture
def claimed_gpu(tmp_path: Path) -> dict[str, str]:
    """Environment of a machine whose nvidia-smi shows an H100 with 79 GiB free."""
    tools = write_commands(tmp_path / "bin", {"nvidia-smi": "echo '0, NVIDIA H100 80GB HBM3, 81559, 80896, 9.0'"})
    return {"PATH": f"{tools}:{CLEAN['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
