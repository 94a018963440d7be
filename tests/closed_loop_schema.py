# SPDX-License-Identifier: Apache-2.0
"""What docs/evaluation.md and the report expect of closed_loop.json."""

from __future__ import annotations

import json
import re

from grpo.tasks.tes.closed_loop import RULES
from grpo.tasks.tes.plant import HOURS

RECORD = {"profiles", "start_kwh", "samples", "vote", "exact", "safe_action", "safe_action_reason", "sampling", "windows",
          "totals"}  # fmt: skip
TOTALS = {"co2_kg", "unserved_kwh", "storage_cycled_kwh", "priced_kg", "regret_percent", "regret_percent_low",
          "regret_percent_high", "unparsed", "answers"}  # fmt: skip


def check_schema(record, models, hours=72):
    json.loads(json.dumps(record, allow_nan=False))
    names = {*models, "optimum", *RULES}
    assert set(record) >= RECORD and set(record["totals"]) == names and record["safe_action"] == 3
    for entry in record["windows"]:
        assert re.fullmatch(r".+: \d{4}-\d\d-\d\d", entry["name"]) and entry["hours"] == hours
        assert entry["start"].endswith(" 00:00") and set(entry["policies"]) == names
        assert len(entry["load_kw"]) == len(entry["co2_kg_per_kwh"]) == hours
        for policy in entry["policies"].values():
            for name in ("actions", "output_kw", "storage_kwh", "co2_kg", "unserved_kwh"):
                assert len(policy[name]) == hours
            assert [a is None for a in policy["actions"]] == [h % 24 not in HOURS for h in range(hours)]
            assert all(value is not None for value in policy["storage_kwh"])
            assert policy["storage_kwh"][7] == record["start_kwh"] and isinstance(
                policy["unparsed"], float if "dropped" in policy else int
            )
    for total in record["totals"].values():
        assert set(total) == TOTALS
        low, high = total["regret_percent_low"], total["regret_percent_high"]
        assert low is None or low <= total["regret_percent"] + 1e-6 <= high + 2e-6
