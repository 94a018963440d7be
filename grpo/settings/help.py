# SPDX-License-Identifier: Apache-2.0
"""The command line of train_grpo.py, the text of its `--help`, and the rows of docs/settings.md."""

import argparse
import itertools
from collections.abc import Iterator, Sequence

from grpo.common import reflow, wrap
from grpo.settings.hints import flag_answers
from grpo.settings.parsing import accepted_words, show
from grpo.settings.table import FIELDS, Settings


def setting_rows() -> Iterator[tuple[str, str, str, str, str, str]]:
    """(group, name, default, default for tiny or '', unit and limits, sentence) of every setting, in order."""
    for name, spec in FIELDS.items():
        meta = spec.metadata
        signs = {"low": ">=", "above": ">", "high": "<="}
        limits = [f"one of {', '.join(accepted_words(name))}"] if accepted_words(name) else []
        limits += [f"{sign} {show(meta[key])}" for key, sign in signs.items() if key in meta]
        flags = {"bool": "0 or 1", "bool | None": "auto, 0 or 1"}
        unit = "; ".join(filter(None, [flags.get(str(spec.type), meta["unit"]), *limits]))
        tiny = "" if meta["tiny"] is None else show(meta["tiny"])
        yield meta["group"], name, show(getattr(Settings(), name)) or "(empty)", tiny, unit, meta["text"]


def help_text(about: str) -> str:
    """The text of `--help`: what the program is `about`, and every setting, grouped."""
    lines = [reflow(about), ""]
    for group, settings in itertools.groupby(setting_rows(), lambda row: row[0]):
        lines += ["", f"{group}:"]
        for _, name, default, tiny, unit, text in settings:
            line = f"  {name}={default}"
            if tiny:
                line += f"   (tiny: {tiny})"
            if unit:
                line += f"   [{unit}]"
            lines += [wrap(line, 10), wrap(f"      {text}", 6)]
    return "\n".join(lines)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    usage = "[NAME=VALUE ...] python %(prog)s [--help | --check [--card NAME]]"
    parser = argparse.ArgumentParser(prog="train_grpo.py", add_help=False, usage=usage)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--card", default="", metavar="NAME", help="with --check: plan for a card that is not here")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error("\n  ".join([f"unrecognized arguments: {' '.join(unknown)}", *flag_answers(unknown)]))
    if options.card and not options.check:
        parser.error("--card: only with --check, which plans for a card that is not here")
    return options
