# SPDX-License-Identifier: Apache-2.0
"""The real entry point, run as a user runs it: what it leaves, and how it continues."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
from damage import KINDS
from helpers import QUESTION, ROOT, read_csv, run_python, run_script
from hub_server import TOKEN, HubServer, files_in
from runs import SETTINGS, assert_same_run, finish, go_on, has_line, run_here, start_held, wait_until

from grpo.data.prompts import prompt_order
from grpo.figures.verdict import loading_advice
from grpo.output.best import read_best
from grpo.output.checkpoints import RESUME_FILES, ROLLOUT, find_checkpoint
from grpo.output.layout import COMPLETE, MANIFEST
from grpo.output.logs import COMPLETIONS, METRICS
from grpo.settings.table import TASK_FIGURES


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory) -> Path:
    """Six steps without an interruption, with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run_script(**SETTINGS | {"OUTPUT_DIR": folder, "EVAL_SAMPLES": 1})
    assert "Mean reward_action_k at temperature" in done.stdout and "complete: 6 steps" in done.stdout
    assert done.stdout.count("\nThis run\n") == 1, "the plan, once; training.log has it as well"
    assert "%|" not in done.stderr and "{'loss'" not in done.stdout, "neither bars nor the Trainer's own lines"
    return folder


def test_the_code_of_the_readme_works_from_any_folder(whole_run, tmp_path):
    """As it is printed: it answers with the model's own chat template."""
    code = re.search(r"```python\n(.*?)```", (whole_run / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    done = run_python("-c", code.replace("Your question", QUESTION), cwd=tmp_path, HF_HUB_OFFLINE=1)
    assert re.search(r"^<\|channel\|>final<\|message\|>\S", done.stdout, re.MULTILINE), done.stdout


def test_what_a_run_leaves(whole_run):
    names = {p.name for p in whole_run.iterdir()}
    expected = "adapter_model.safetensors adapter_config.json tokenizer.json chat_template.jinja training.log"
    expected += " metrics.csv completions.csv settings.json versions.json evaluation.json checkpoint-6"
    assert set(expected.split()) <= names and not list(whole_run.rglob("*.tmp"))
    saved = {path.name for path in (whole_run / "checkpoint-6").iterdir()}
    others = "README.md tokenizer.json tokenizer_config.json chat_template.jinja training_args.bin"
    assert saved == {*RESUME_FILES, *others.split(), MANIFEST} - {ROLLOUT}
    metrics, completions = read_csv(whole_run / "metrics.csv"), read_csv(whole_run / "completions.csv")
    own = ["reward/action", "reward/hold"]
    assert list(metrics[0]) == [*(name for name in METRICS if name not in TASK_FIGURES), *own, "log_metric"]
    assert list(completions[0]) == [*COMPLETIONS, *own, "log_extra"]
    assert [row["step"] for row in metrics] == list("123456")
    assert [row["step"] for row in completions] == [str(step) for step in range(1, 7) for _ in range(12)]
    record = json.loads((whole_run / "settings.json").read_text())
    assert record["settings"]["SEED"] == 5 and record["sources"]["LORA_R"] == "tiny" and record["choices"]["attention"]
    log = (whole_run / "training.log").read_text()
    assert "step 6/6" in log and "\nThis run\n" in log and "Traceback" not in log and "PAD/BOS" not in log
    plan = log.partition("\nThis run\n")[0]
    assert "\n  SEED  " in plan and "\n  EPSILON" not in plan and "\n  MICRO_BATCH" not in plan, "what differs alone"
    left = [line.split("; about ")[1:] for line in log.splitlines() if " step " in line and "/6: reward" in line]
    assert [" left" in "".join(words) for words in left] == [False, False, True, True, True, False]


def test_rows_agree_with_the_csv_and_with_each_other(whole_run):
    """Each logged completion against its source row: group, action, reward; and the metrics against the completions."""
    source = read_csv(ROOT / SETTINGS["DATA"])
    completions, metrics = read_csv(whole_run / "completions.csv"), read_csv(whole_run / "metrics.csv")
    for row in completions:
        origin = source[int(row["prompt_id"].split(":")[1]) - 1]
        values = [float(origin[f"reward_action_{k}"]) for k in range(4)]
        assert int(row["best_action"]) == values.index(max(values))
        expected = values[int(row["parsed_action"])] if row["parsed_action"] else 0.0
        assert float(row["reward"]) == pytest.approx(expected, rel=1e-5)
        assert row["completion"].endswith(("<|return|>", "<|endoftext|>", "<|call|>")) != (row["truncated"] == "1")
    for metric in metrics:
        mine = [row for row in completions if row["step"] == metric["step"]]
        assert [row["prompt_id"] for row in mine] == [mine[i - i % 4]["prompt_id"] for i in range(12)], "groups of four"
        mean = sum(float(row["reward"]) for row in mine) / 12
        rates = {"reward": mean, "parse_rate": sum(row["parsed_action"] != "" for row in mine) / 12}
        rates["clipped_ratio"] = sum(row["truncated"] == "1" for row in mine) / 12
        rates["tokens_mean"] = sum(int(row["tokens"]) for row in mine) / 12
        assert {name: float(metric[name]) for name in rates} == pytest.approx(rates, rel=1e-5, abs=1e-5)
        assert float(metric["rollout_s"]) + float(metric["learn_s"]) <= float(metric["step_s"]) + 1e-3
    order = list(prompt_order(len(source), 5, 18))
    assert [int(r["prompt_id"].split(":")[1]) - 1 for r in completions[::4]] == order


def test_the_zip_holds_everything_but_optimizer_states(whole_run):
    with zipfile.ZipFile(whole_run.with_name("run.zip")) as archive:
        assert archive.testzip() is None
        inside = set(archive.namelist())
        here, data = [str(path).encode() for path in (whole_run.parent, ROOT)], str(SETTINGS["EVAL_DATA"]).encode()
        texts = {name: archive.read(name).replace(data, b"") for name in inside - {"run/settings.json"}}
        assert not [name for name, text in texts.items() if any(path in text for path in here)]
        settings = archive.read("run/settings.json")
        assert settings == (whole_run / "settings.json").read_bytes(), "it may take the place of the run's own"
    on_disk = {str(p.relative_to(whole_run.parent)) for p in whole_run.rglob("*") if p.is_file()}
    left_out = {Path(name).name for name in on_disk - inside}
    assert left_out == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", COMPLETE}
    assert inside <= on_disk and "run/checkpoint-6/adapter_model.safetensors" in inside


def test_the_model_card(whole_run, tiny):
    """In the run, whose code names its folder, and in its checkpoints, whose code names no path of this machine."""
    card, saved = ((whole_run / name / "README.md").read_text(encoding="utf-8") for name in ("", "checkpoint-6"))
    for text in (card, saved):
        assert (
            "for data/tiny, trained for 6 steps with GRPO" in text and "base_model" not in text and "None" not in text
        )
    assert "data/tiny of the project train_grpo.py" in saved and str(tiny.parent) not in saved
    assert 'from_pretrained(model, ".")' in saved and str(whole_run) not in saved
    note = card.split("\n\n")[2] + "\n\n"
    assert note.strip() == loading_advice(read_best(whole_run), 6).strip()
    assert (f'(model, "{whole_run}/best")' in card) == ("Load the adapter in `best/`" in note)
    assert f'(model, "{whole_run}' in card and f'from_pretrained("{tiny}")' in card


def test_a_run_that_is_killed_moved_and_stopped_is_the_uninterrupted_one(whole_run, tmp_path):
    """Killed after step 3 with its last checkpoint at 2, and a checkpoint and the logs torn as a crash may tear them.
    Then another machine, that is a folder of another name, goes on until a SIGTERM."""
    old, folder = tmp_path / "run", tmp_path / "other" / "copy"
    process = start_held(old, 3)
    process.kill()
    finish(process)
    assert find_checkpoint(old)[0] == 2
    shutil.copytree(old / "checkpoint-2", old / "checkpoint-4")
    os.truncate(old / "checkpoint-4" / "trainer_state.json", 40)
    with (old / "completions.csv").open("a") as file:
        file.write('4,tes_heldout_compact:7,"<|channel|>final<|mess')
    folder.parent.mkdir()
    old.rename(folder)
    process = start_held(folder, 4)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: has_line(folder), process)
    go_on(folder)
    output = finish(process)
    assert process.returncode == 143 and "continuing from step 2" in output and "Traceback" not in output, output
    assert "interrupted at step 5; the same command continues from step 5" in output
    assert folder.with_name("copy.zip").exists() and (folder / "adapter_model.safetensors").exists()
    done = run_script(**SETTINGS | {"OUTPUT_DIR": folder})
    assert "continuing from step 5" in done.stdout
    assert_same_run(folder, whole_run)
    assert (folder / "superseded-checkpoint-4" / "optimizer.pt").is_file()
    names = {path.name for path in folder.rglob("*") if path.is_file() and str(old).encode() in path.read_bytes()}
    assert names <= {"training.log", "training_args.bin"}, "what was logged, and what nothing reads"


def test_a_run_killed_after_its_last_step_is_finished_by_the_same_command(whole_run, tmp_path):
    """What damaged records held is measured again, with the same result."""
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    for name in (COMPLETE, "adapter_model.safetensors"):
        (folder / name).unlink()
    for name in ("evaluation.json", "best/best.json"):
        KINDS["one bit"](folder / name)
    done = run_script(**SETTINGS | {"OUTPUT_DIR": folder, "EVAL_SAMPLES": 1})
    assert (tmp_path / "run.zip").exists() and "Mean reward_action_k at temperature" in done.stdout
    for words in ("evaluation.json is damaged, so its figures are measured again", "best/: best.json cannot be read"):
        assert words in done.stdout
    assert (folder / "evaluation.json").read_bytes() == (whole_run / "evaluation.json").read_bytes()
    assert (folder / "superseded-best").is_dir() and (folder / COMPLETE).exists()
    assert_same_run(folder, whole_run)


def test_a_run_writes_through_nothing_that_came_into_its_folder(tmp_path):
    """While it trained: pipes, which would hang it at its end, and a link out of the folder."""
    folder, outside = tmp_path / "run", tmp_path / "outside.json"
    process = start_held(folder, 1, TOTAL_STEPS=2)
    for name in ("adapter_config.json", "chat_template.jinja", "tokenizer.json"):
        os.mkfifo(folder / name)
    outside.write_text("mine")
    (folder / "tokenizer_config.json").symlink_to(outside)
    go_on(folder)
    assert "complete: 2 steps" in finish(process) and outside.read_text() == "mine"
    assert all(path.is_file() and not path.is_symlink() for path in folder.glob("*.*"))
    assert not (folder / "adapter.tmp").exists() and "for data/tiny" in (folder / "README.md").read_text()


def test_overwrite_starts_again_with_files_of_other_columns_and_a_users_own_reward(tmp_path, whole_run, monkeypatch):
    """TRL takes the columns from the first completion of a step: whichever file it comes from, all must be there. Also
    luspo, a KL penalty, NaN for invalid answers and batches of its own: another run in the same folder."""
    (tmp_path / "a.csv").write_text("user,reward_action_0,reward_action_1,zone" + "\nhour,0.1,0.9,north" * 3)
    header = "user,reward_action_0,reward_action_1,reward_action_2,prompt_id,invalid_reward"
    (tmp_path / "b.csv").write_text(header + "\nhour,0.1,0.9,0.5,mine,7" * 3)
    (tmp_path / "own.py").write_text(
        "def short(texts, *, zone, prompt_id, invalid_reward, truncated, completion_ids, **columns):\n"
        "    for row in zip(zone, prompt_id, invalid_reward):\n"
        "        assert row in (('north', None, None), (None, 'mine', '7')), row\n"
        "    assert all(c.startswith('<|start|>assistant') for c in texts)\n"
        "    return [None if cut else 1 / len(ids) for cut, ids in zip(truncated, completion_ids)]\n"
    )
    folder = tmp_path / "out put" / "ü"
    shutil.copytree(whole_run, folder)
    changes = {"OVERWRITE": 1, "TOTAL_STEPS": 3, "REWARDS": "own:short=2,action", "LOSS_TYPE": "luspo", "BETA": 0.1,
               "INVALID_REWARD": "nan", "SAVE_STEPS": 1, "MICRO_BATCH": 4, "GENERATION_BATCH": 6}  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run_here(**SETTINGS | {"OUTPUT_DIR": "out put/ü", "DATA": "a.csv,b.csv"} | changes)
    metrics, completions = read_csv(folder / "metrics.csv"), read_csv(folder / "completions.csv")
    assert len(metrics) == 3 and all(row["entropy"] and row["kl"] for row in metrics), "TRL's head computes the entropy"
    assert {row["prompt_id"][0] for row in completions} == {"a", "b"} and folder.with_name("ü.zip").exists()
    assert not (folder / "checkpoint-6").exists()
    for row in completions:
        if row["truncated"] == "0" and row["parsed_action"]:
            assert float(row["reward"]) > 2 / int(row["tokens"])


def test_a_model_of_the_hub_is_downloaded(tiny, tmp_path):
    """A user is refused without a token, and runs with it on quantized experts."""
    settings = {"MODEL_ID": "org/tiny-gpt-oss", "OUTPUT_DIR": tmp_path / "run", "TOTAL_STEPS": 1, "EXPERTS": "mxfp4"}
    settings |= {"PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 2, "MAX_COMPLETION_LEN": 8, "USE_VLLM": 0}
    settings["ATTN_IMPL"] = "eager"
    with HubServer() as hub:
        hub.add("org/tiny-gpt-oss", files_in(tiny), gated=True)
        settings = SETTINGS | settings | hub.environ(tmp_path / "home")
        refused = run_script(code=2, **settings)
        assert "one problem" in refused.stderr and "Traceback" not in refused.stderr
        assert "accept the licence on its page" in refused.stderr and not (tmp_path / "run").exists()
        done = run_script(**settings | {"HF_TOKEN": TOKEN})
    for words in ("complete: 1 steps", "EXPERTS                   mxfp4"):
        assert words in done.stdout


def test_a_gpu_that_torch_does_not_see_is_said_before_anything_is_written(tmp_path, claimed_gpu):
    done = run_script(code=2, **SETTINGS | {"OUTPUT_DIR": tmp_path / "run", "USE_VLLM": 0} | claimed_gpu)
    assert "does not see it" in done.stderr and "driver 580" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"], "no lock file either"
