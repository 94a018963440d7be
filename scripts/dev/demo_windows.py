# SPDX-License-Identifier: Apache-2.0
"""The windows on which the demo is judged, fixed before any setting of it was chosen.

`selection` picks best/ and the settings, and is never reported. `shown` are the windows of data/profile_heldout.csv
that a user sees. `others` are further days of the same synthetic weather. `varied` are days whose loads are multiplied
by a factor of their own, log-uniform from a half to double, as another season or building would have them. The policy
to beat on the reported sets is the rule `charge_when_clean`.
"""

from grpo.tasks.tes.dataset import DATA_DIR, synthetic_windows, vary_loads
from grpo.tasks.tes.plant import HOURS
from grpo.tasks.tes.profiles import HELDOUT_START, Profile, profile_csv, synthetic_profile

RULE = "charge_when_clean"
REPORTED = ("shown", "others", "varied")
SEED = 1
# Random streams beyond those of the data files and short hours (dataset.py), so that no day is shared with them.
STREAMS = {"selection": 4, "others": 5, "varied": 6}
COUNTS = {"selection": 10, "others": 20, "varied": 20}
MOST_FACTOR = 2.0  # Largest factor of a varied day's load; the smallest is its reciprocal.


def profile_text(name: str) -> str:
    """The hourly profile of a set of windows, as CSV text: four days a window, one window a week from HELDOUT_START.

    Raises KeyError for a set that is not known."""
    if name == "shown":
        return (DATA_DIR / "profile_heldout.csv").read_text(encoding="utf-8")
    stream = STREAMS[name]
    blocks = []
    for number, (window, generator) in enumerate(synthetic_windows(SEED, stream, COUNTS[name], HELDOUT_START)):
        block = synthetic_profile((SEED, stream, number), len(window.dates), window.dates[0])
        if name == "varied":
            load_kw = block.load_kw.copy()
            load_kw[:, HOURS[0] : HOURS[-1] + 1] = vary_loads(window, generator, MOST_FACTOR).load_kw
            block = Profile(block.dates, block.co2, load_kw)
        blocks.append(block)
    return profile_csv(blocks)
