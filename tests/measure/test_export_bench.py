# SPDX-License-Identifier: Apache-2.0
"""`bench.py export` on the tiny model, without vLLM: what is merged is what was there, and a wrong merge fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo.evaluate import export
from grpo.measure.export import bench_export
from grpo.measure.record import read_json


@pytest.mark.parametrize("right", [True, False])
def test_a_merged_model_is_compared_with_base_and_adapter(tmp_path, monkeypatch, right):
    if not right:
        scale = export.check_merge
        monkeypatch.setattr(export, "check_merge", lambda *given: scale(*given) / 2)
    options = SimpleNamespace(model="tiny", out=str(tmp_path / "out.json"), run=str(tmp_path / "run"))
    assert bench_export(options) == int(not right)
    found = {one["name"]: one["value"] for one in read_json(tmp_path / "out.json")["figures"]}
    assert found["adapter_nats"] > 0.1
    assert (found["transformers_nats"] < found["adapter_nats"] / 5) == right
    assert found["share"] > 0.99
