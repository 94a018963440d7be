# SPDX-License-Identifier: Apache-2.0
"""The grammar of Harmony, gpt-oss's format (https://cookbook.openai.com/articles/openai-harmony): channels and answers.

A turn of the assistant is one message or several, each in a channel:

    <|start|>assistant<|channel|>analysis<|message|>Prices rise at six, so charge now.<|end|>
    <|start|>assistant<|channel|>final<|message|>[2]<|return|>

The line break between the two is only for reading. `analysis` holds the reasoning, `final` the answer, in which `[k]`
names action k. A rendered prompt ends in `<|start|>assistant`, and the model writes what follows; a prompt may also
open a channel, so that the completion begins within it. Between the name of a channel and `<|message|>` there may be a
recipient or a content type."""

import re

ASSISTANT = "<|start|>assistant"  # where the assistant's turn begins, and each of its messages
FINAL = "<|channel|>final<|message|>"
RETURN = "<|return|>"  # ends a turn; the tokens at which a completion stops are `stop_tokens` in grpo/model/load.py
ANSWER_BEFORE, ANSWER_AFTER = f"{FINAL}[", f"]{RETURN}"  # around the number of the action, in an answer without words


def _any_of(tokens: str) -> str:
    """A pattern of these special tokens, whose names are separated by `|`."""
    return rf"<\|(?:{tokens})\|>"


TOKEN = re.compile(_any_of("start|end|message|channel|return|call|constrain|startoftext|endoftext"))
_MARKER = re.compile(_any_of("start|channel|message|end|return|call"))
_END = _any_of("end|return|call|start|channel|endoftext")  # of a message
_FINAL = re.compile(rf"<\|channel\|>\s*final\b(?:(?!{_END}|<\|message\|>).)*<\|message\|>(.*?)(?={_END}|\Z)", re.DOTALL)
_ACTION = re.compile(r"\[\s*([0-9]{1,6})\s*\]")
_TURN_OPENED = re.compile(r"<\|start\|>assistant(?:<\|channel\|>[^<]*(?:<\|message\|>)?)?\Z")


def final_channel(text: str) -> str | None:
    """The text of the last message in Harmony's final channel, or None if there is no such message.

    In text with special tokens only these mark a channel, so that reasoning may mention a channel by name. In text
    whose special tokens were stripped, role and channel are glued together, and the answer follows the last
    `assistantfinal`, or a `final` that begins the text.

    >>> final_channel("<|channel|>analysis<|message|>Is it [1]?<|end|><|start|>assistant<|channel|>final<|message|>[2]")
    '[2]'
    >>> final_channel("analysisMaybe [1] or [3].assistantfinal[3]")
    '[3]'
    >>> final_channel("<|channel|>analysis<|message|>I would say assistantfinal[2], but the tokens ran") is None
    True
    """
    if _MARKER.search(text):
        answers = _FINAL.findall(text)
        return answers[-1] if answers else None
    before, glue, answer = text.rpartition("assistantfinal")
    if glue:
        return answer
    return text.removeprefix("final") if text.startswith("final") else None


def parse_action(text: str, actions: int = 4) -> int | None:
    """The action `[k]` that the final channel names, 0 <= k < `actions`, or None.

    An answer that names several different actions does not count, because it would pay to name them all.

    >>> parse_action("<|channel|>final<|message|>[2]<|return|>")
    2
    >>> [parse_action(f"assistantfinal{answer}") for answer in ("[0] or [1]", "[4]", "2", "[2", "")]
    [None, None, None, None, None]
    """
    answer = final_channel(text)
    named = {int(digits) for digits in _ACTION.findall(answer)} if answer else set()
    action = named.pop() if len(named) == 1 else None
    return action if action is not None and action < actions else None


def answer_turn(text: str) -> str:
    """A whole turn without reasoning, whose final channel holds `text`."""
    return f"{ASSISTANT}{FINAL}{text}{RETURN}"


def assistant_turn(prompt: str, completion: str) -> str:
    """The assistant's whole turn: the end of the prompt, from `<|start|>assistant` on, and the completion. The prompt
    may already open the final channel; with its tokens, a completion without any is not mistaken for stripped text.

    >>> parse_action(assistant_turn("...<|start|>assistant<|channel|>final<|message|>", "[3]<|return|>"))
    3
    """
    start = prompt.rfind(ASSISTANT)
    return (prompt[start:] if start >= 0 else "") + completion


def completion_of(prompt: str, turn: str) -> str:
    """The completion of a rendered `prompt` that completes it to the assistant's whole `turn`."""
    return turn.removeprefix(assistant_turn(prompt, ""))


def begins_turn(prompt: str) -> bool:
    """Whether a rendered prompt ends where the assistant writes on: at the begin of its turn, or in a channel."""
    return _TURN_OPENED.search(prompt) is not None


def opened_turn(prompt: str) -> str:
    """The part of the assistant's turn that a rendered prompt ends with, such as `<|channel|>final`."""
    return prompt.rpartition(ASSISTANT)[2]


def open_answer(prompt: str) -> str:
    """Extend a rendered prompt so that it ends in ANSWER_BEFORE and the next token names the action (DIRECT_ANSWERS).
    Raises ValueError if the prompt opens another channel."""
    opened = opened_turn(prompt)
    if not ANSWER_BEFORE.startswith(opened):
        raise ValueError(f"the prompt ends with {opened[-80:]!r}, which {ANSWER_BEFORE!r} does not begin with")
    return prompt + ANSWER_BEFORE.removeprefix(opened)
