# SPDX-License-Identifier: Apache-2.0
"""The fields of closed_loop.json that docs/evaluation.md and the report rely on."""

import json
import re

from grpo.tasks.tes.closed_loop import RULES

RECORD = {"profiles", "samples", "exact", "sampling", "windows", "totals"}
TOTALS = {"co2_kg", "unserved_kwh", "storage_cycled_kwh", "priced_kg", "regret_percent", "regret_percent_low"}
TOTALS |= {"regret_percent_high", "unparsed", "answers", "unserved_windows", "worst_window", "worst_unserved_kwh"}


def check_schema(record, models):
    json.dumps(record, allow_nan=False)
    names = {*models, "optimum", *RULES}
    assert set(record) >= RECORD and set(record["totals"]) == names
    for entry in record["windows"]:
        assert re.fullmatch(r".+: \d{4}-\d\d-\d\d", entry["name"]) and set(entry["policies"]) == names
        assert len(entry["load_kw"]) == 30 and len(entry["co2_kg_per_kwh"]) == 40
        for policy in entry["policies"].values():
            assert len(policy["actions"]) == len(policy["storage_kwh"]) == 30
            assert isinstance(policy["unparsed"], (int, float))
    for name, total in record["totals"].items():
        assert set(total) == TOTALS
        unserved = {entry["policies"][name]["mean"]["unserved_kwh"]: entry["name"] for entry in record["windows"]}
        assert total["worst_unserved_kwh"] == max(unserved)
        assert total["worst_window"] == (unserved[max(unserved)] if total["unserved_windows"] else None)
        low, high = total["regret_percent_low"], total["regret_percent_high"]
        assert low is None or low <= total["regret_percent"] + 1e-6 <= high + 2e-6
