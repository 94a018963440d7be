# SPDX-License-Identifier: Apache-2.0
"""Tool calls in Harmony: reads the call at the end of a turn from its token ids, and writes the result's message.

The model writes a call in several forms, and all of them occur in gpt-oss's text:

    <|channel|>commentary to=functions.run <|constrain|>json<|message|>{"level": 2}<|call|>
     to=functions.run<|channel|>commentary json<|message|>{"level": 2}<|call|>
    <|channel|>analysis to=functions.run code<|message|>{"level": 2}<|call|>

The recipient may stand in the role or in the channel, with a content type or without, on any channel. Servers take all
of these, so training does too. The result follows as a message of the tool, and the assistant writes on behind it:

    <|start|>functions.run to=assistant<|channel|>commentary<|message|>41 kWh<|end|><|start|>assistant

Sampled ids stay as they are: only the result is tokenized, and what the model wrote before is never written again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo.common import without_surrogates
from grpo.harmony import ASSISTANT

SPECIAL = ("start", "channel", "message", "end", "return", "call")  # The special tokens that structure a turn.
NAMESPACE = "functions."
# A name that Harmony can carry: a space or `<` would end it, and a schema's name has no dots.
TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_AUTHOR = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_BEGIN_OF_TOKEN = re.compile(r"<\|(?=[A-Za-z0-9_]+\|>)")
MOST_DEPTH = 100  # JSON is read to a depth of almost 1000, but pickle, which sends arguments on, fails at half of that.


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it. `fault` says why it cannot be run, in words that the model can act on."""

    author: str  # Whose message answers it: the recipient that the model named.
    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    fault: str = ""


def special_ids(token_id: Callable[[str], int | None]) -> dict[str, int]:
    """The ids of SPECIAL; `token_id` gives that of a token, None for one that the tokenizer lacks. Raises ValueError
    for a tokenizer without them."""
    ids = {name: token_id(f"<|{name}|>") for name in SPECIAL}
    if missing := [name for name, number in ids.items() if number is None]:
        raise ValueError(f"the tokenizer has no {', '.join(f'<|{name}|>' for name in missing)}")
    return {name: number for name, number in ids.items() if number is not None}


def read_call(ids: Sequence[int], special: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> Call | None:
    """The call in the last message of a turn, whose `ids` follow `<|start|>assistant` and end in a stop token. None if
    that message calls nothing: the turn is an answer.

    Only special tokens divide the turn, so that text which looks like them divides nothing."""
    ends = {special[name] for name in ("end", "return", "call")}
    body_end = len(ids) - (ids[-1] in ends)
    begin = max((n for n in range(body_end) if ids[n] == special["start"]), default=-1) + 1
    divider = next((n for n in range(begin, body_end) if ids[n] == special["message"]), body_end)
    recipient = _RECIPIENT.search(decode(ids[begin:divider]))
    if recipient is None or recipient[1] in ("assistant", "user", "all"):
        if ids[-1] != special["call"]:
            return None
        return Call("functions", fault="the call names no tool: write to=functions.NAME before <|message|>")
    author = recipient[1] if _AUTHOR.fullmatch(recipient[1]) else "functions"
    if not recipient[1].startswith(NAMESPACE):
        return Call(author, fault=f"there is no tool {recipient[1][:100]!r}: write to=functions.NAME")
    name, text = recipient[1].removeprefix(NAMESPACE), decode(ids[divider + 1 : body_end]).strip()
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return Call(author, name, fault=f"the arguments are no JSON object ({error})")
    if not isinstance(arguments, dict):
        return Call(author, name, fault=f"the arguments are {type(arguments).__name__}, not a JSON object")
    if is_deeper(arguments, MOST_DEPTH):
        return Call(author, name, fault=f"the arguments are nested more than {MOST_DEPTH} times")
    return Call(author, name, arguments)


def is_deeper(value: object, most: int) -> bool:
    """Whether lists and objects of JSON are nested in each other more than `most` times."""
    level = [value]
    for _ in range(most + 1):
        nested = [part for part in level if isinstance(part, (dict, list))]
        level = [part for parts in nested for part in (parts.values() if isinstance(parts, dict) else parts)]
    return bool(level)


def write_call(name: str, arguments: Mapping[str, object]) -> str:
    """A turn that calls a tool, in the form that gpt-oss writes most."""
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to={NAMESPACE}{name} <|constrain|>json<|message|>{without_tokens(text)}<|call|>"


def shown_calls(value: object, names: Sequence[str]) -> list[str]:
    """The turns of a demonstration: `value` is a list of {"name": ..., "arguments": {...}}, of the tools `names`.
    Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"it is {type(value).__name__}, not a list")
    turns = []
    for number, call in enumerate(value, 1):
        if not isinstance(call, dict) or not isinstance(arguments := call.get("arguments", {}), dict):
            raise ValueError(f"call {number} is {call!r:.100}, not an object with name and arguments")
        if call.get("name") not in names:
            raise ValueError(f"call {number} names no tool: {call.get('name')!r:.100}; there are {', '.join(names)}")
        turns.append(write_call(call["name"], arguments))
    return turns


def without_tokens(text: str) -> str:
    """The text with `<|name|>` written as `< |name|>`: no tool and no prompt may end a message or begin another. Half a
    character is replaced too: a model writes one as `\\ud83d` into a call, and the tool repeats it."""
    return _BEGIN_OF_TOKEN.sub("< |", without_surrogates(text))


def error_text(fault: str) -> str:
    """The result of a call that failed."""
    return json.dumps({"error": fault}, ensure_ascii=False)


def result_parts(author: str) -> tuple[str, str]:
    """The texts before and behind a result's content, up to where the assistant writes on."""
    return f"<|start|>{author} to=assistant<|channel|>commentary<|message|>", f"<|end|>{ASSISTANT}"
