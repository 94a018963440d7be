# SPDX-License-Identifier: Apache-2.0
"""Whether a trained model is better than other policies. Every page, table and card prints what is decided here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.tasks.figure_text import finite_number
from rewards import LEAST_ALIKE

BASE = "the base model"
# Of so many clusters at least one bears a loss that one cluster in ten bears, with a probability of 95%.
FEW_CLUSTERS = 30
RARE_LOSSES = (  # measured with such losses; docs/evaluation.md says the same
    "an interval over few {0}s cannot show rare losses: with one {0} in ten bearing a large loss, 38% of such "
    "intervals hold the truth at five {0}s, 65% at 15"
)


@dataclass(frozen=True)
class Comparison:
    """The 95% interval of a trained model's gain over another policy, above 0 where it is better, over `clusters` of a
    `unit` such as days. Both ends are None where there is no interval, `clusters` where nobody counted them."""

    other: str
    low: float | None
    high: float | None
    clusters: int | None = None
    unit: str = "prompt"

    @property
    def outcome(self) -> str:
        """`better`, `worse`, or `unknown`. An interval of width zero over few clusters shows no spread: unknown."""
        if self.low is None or self.high is None:
            return "unknown"
        if not self.low < self.high and (self.clusters or 0) < LEAST_ALIKE:
            return "unknown"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "unknown"

    def caveat(self) -> str:
        """Why the interval says little; empty if it does not."""
        if self.clusters == 1:
            return f"a single {self.unit} shows nothing"
        if self.clusters is None or self.clusters >= FEW_CLUSTERS:
            return ""
        if self.low is None:
            return f"{self.clusters} {self.unit}s show no spread"
        return RARE_LOSSES.format(self.unit)


def compare(other: str, figures: Mapping[str, object], name: str = "reward", unit: str = "prompt") -> Comparison:
    """The comparison in `figures`, whose gain is called `name`."""
    low, high = (finite_number(figures.get(f"{name}_{end}")) for end in ("low", "high"))
    clusters = finite_number(figures.get("clusters"))
    known = not math.isnan(low + high)
    count = None if math.isnan(clusters) else int(clusters)
    return Comparison(other, low if known else None, high if known else None, count, unit)


def verdict(comparisons: Sequence[Comparison], trained: str = "the trained model") -> str:
    """A clause on how the model, called `trained`, compares with each of the other policies; empty without any. It
    never names the base model alone if another policy was compared."""
    if not comparisons:
        return ""
    others = {outcome: [c.other for c in comparisons if c.outcome == outcome] for outcome in ("better", "worse")}
    parts = [f"is {outcome} than {' and '.join(names)}" for outcome, names in others.items() if names]
    unknown = " or ".join(c.other for c in comparisons if c.outcome == "unknown")
    if unknown and parts:
        parts.append(f"cannot be told from {unknown}")
    clause = f"{trained} {', but '.join(parts)}" if parts else f"this evaluation cannot tell {trained} from {unknown}"
    caveats = dict.fromkeys(filter(None, (comparison.caveat() for comparison in comparisons)))
    return "; ".join([clause, *caveats])


def obstacle(comparisons: Sequence[Comparison]) -> str:
    """Why a model is not one to load, in words that follow `No adapter`; empty if it is one, or was not compared."""
    for comparison in comparisons:
        if comparison.outcome == "worse":
            return f"beats {comparison.other}"
    is_unknown = any(c.other == BASE and c.outcome == "unknown" for c in comparisons)
    return f"is shown to beat {BASE}" if is_unknown else ""
