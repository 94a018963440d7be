# SPDX-License-Identifier: Apache-2.0
"""Reads the number that an answer states. Spellings are normalized; whatever is not one number is refused, not guessed.

math-verify, which TRL uses, fails the table of tests/test_numerals.py: it reads `$9{,}500` as 9, `3 million` as 3, `5½`
as 5, `5-10` as -5, 9 500 with a no-break space as 500, and finds nothing in `-$3`."""

import functools
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
# Spellings and what replaces them, in this order. NFKC comes after the first group: it would make 52 of 5² and 51/2 of
# 5½, and it turns full-width characters, fractions and other spaces into plain ones.
_BEFORE_NFKC = [
    (r"[\u2010-\u2013\u2212]", "-"),
    (r"[\u2014\u2015]", " ; "),  # A long dash is punctuation: `the answer—42`.
    (r"[\u2018\u2019]", "'"),
    (r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " "),
    (r"(?=[\u00b2\u00b3\u00b9\u2070-\u2079])", "^"),
]
_AFTER_NFKC: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"<<[^<>]*>>", ""),  # GSM8K's calculator: <<6*7=42>>42
    (r"</?[A-Za-z][^<>]*>", " "),  # <answer>42</answer>
    (r"[\u2044\u2215]", "/"),
    (r"\{([,.])\}", r"\1"),  # LaTeX writes 9{,}500, 9,\!500 and 9\,500.
    (r"\\!", ""),
    (r"\\(?=[$%#&])|\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\]]", ""),
    (r"\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
    (r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf|it)|mbox|boxed)\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\s*(?:\{\s*)?(?:\\circ|\u00b0)\s*\}?|\u00b0", " degrees "),
    (r"(?<=\d)\s*(?=\\[dtc]?frac)", " "),
    (r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", r"\1\2/\3\4"),
    (r"\\approx|[\u2248=]", " = "),
    (r"(?<=\d)[$€£¥₹₩¢](?=\d)", ";"),  # `$5$10` is two prices.
    (r"(?<![A-Za-z])[A-Z]{0,3}[$€£¥₹₩¢]|[%$€£¥₹₩¢]", ""),
    # 42 cm^2 is an area, not the power of a variable.
    (r"(?<![A-Za-z])([mcdk]?m|in|ft|yd|mi|inches|feet|met(?:er|re)s?|units?) ?\^ ?\{?[23]\}?", r"\1"),
    (r"(?<=[^\x00-\x7f])(?=[-+]?\d)|(?<=\d)(?=[^\W\d_])(?=[^\x00-\x7f])", " "),  # 答えは42です
    (r"(?<=[^\W\d]):", ": "),
    (r"。", ". "),
    (r"\.{2,}", " "),
    (r"[(\[]\s*[-+]?[\d./]+,\s[^()\[\]\n]*[)\]]", lambda match: re.sub(r",\s+", ";", match[0])),  # (1, 2) is a point
    (r"(?m)^[^\S\n]*[*+•]\s", ""),  # the bullet of a list
    (r"([=:(])[^\S\n]*([-+])[^\S\n]+(?=[.\d])", r"\1 \2"),
    (r"(?<![\w.,/^])([1-9]\d{0,2}(?:[^\S\n]\d{3}){1,6})(?![\d,/^])",  # 9 500
     lambda match: re.sub(r"\s", "", match[0])),
    (r"(?<![\w.,/^])(\d{1,9})[^\S\n]+(\d{1,9})/(\d{1,9})(?![\w/.^])",  # 5 1/2
     lambda match: f"{int(match[1]) * int(match[3]) + int(match[2])}/{match[3]}"),
]  # fmt: skip
_NUMERAL = re.compile(
    r"(?P<top>[-+]?(?:(?:\d+|[1-9]\d{0,2}(?:[,'_]\d{3})+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2})?)(?:/(?P<bottom>\d+))?"
    r"(?P<unit>(?:[A-Za-z]{2,})?)(?:[-/][A-Za-z]{2,})*"  # 42kg, 5/lb, 3-digit; 5m may be metres or millions
)
# Punctuation and emphasis before a word, and behind it, read backwards: a search for the end would be quadratic.
_FRONT, _BACK = re.compile(r"^(?:[^\w.+\-<>≤≥≠±×÷·^/\\|]|_)+"), re.compile(r"^(?:[^\w+\-<>≤≥≠±×÷·^/\\|]|_)+")
_NAME = re.compile(r"[A-Za-z]+\d+[A-Za-z]*")  # such as B12
_OPERATORS = frozenset("+-*/^×÷·±<>≤≥≠xX") | {"minus", "negative", "plus", "times", "over"}
_JOINING = frozenset({"to", "or", "and", "through"})  # `5 to 10` and `42 or 43` are two numbers.
# `3 million` may be 3 (how many millions?) or 3,000,000; `2 y` is a product.
_WORDS = (
    "k K M B bn mn tn mil mio hundred thousand million billion trillion dozen lakh crore pi π sqrt y n squared cubed"
)
_SCALES = frozenset(_WORDS.split())
_EASTERN_SCALES = tuple("百千万億亿兆")
MOST_CHARACTERS = 60  # of a numeral; Python refuses to read some that are longer


def normalized(text: str) -> str:
    """The text with plain spellings of numbers: no LaTeX, no currency, no spaces between thousands."""
    for pattern, plain in _BEFORE_NFKC:
        text = re.sub(pattern, plain, text)
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _AFTER_NFKC:
        text = re.sub(pattern, replacement, text)
    return text


def number_of(text: str) -> Fraction | None:
    """The number that an answer ends in: the only one in the line behind the last `####`, or else in the last
    `\\boxed{}`, or else the last one of the text. None if that is not exactly one number, as in `5-10` or `x^2+1`.
    Thousands separators, currency and percent signs and units are ignored, and 0.75 equals 3/4.

    >>> [str(number_of(text)) for text in ("6 * 7 = 42 #### 42", "so $1,050.00.", "#### -$3", "$9{,}500", "5½")]
    ['42', '1050', '-3', '9500', '11/2']
    >>> [number_of(text) for text in ("#### none", "5-10", "x^2+1", "9,5", "#### 42 or 43", "3 million", "")]
    [None, None, None, None, None, None, None]
    """
    marked = marked_part(text)
    if marked is not None:
        return sole_number(marked)
    numbers = read_numerals(normalized(text))
    return numbers[-1] if numbers else None


@functools.cache  # The checks before a run read each answer three times, and a reward once for each completion.
def gold_number(text: str) -> Fraction | None:
    """The number of a correct answer in a data set: like `number_of`, but without a mark it must be the only one."""
    marked = marked_part(text)
    return sole_number(text if marked is None else marked)


def marked_part(text: str) -> str | None:
    """The first line with a digit behind the last `####`, or else what the last `\\boxed{}` holds; None without either.
    It begins with `=`, so that `- 5` there is -5: in running text that may be the item of a list."""
    parts = [part for part in re.split("#{4,}", text)[1:] if part.strip()]
    if parts or "####" in text:
        lines = parts[-1].strip().splitlines() if parts else []
        return "= " + next((line for line in lines if re.search(r"\d", line)), "")
    boxes: list[str] = _BOXED.findall(text)
    return f"= {boxes[-1]}" if boxes else None


def sole_number(text: str) -> Fraction | None:
    """The number of a text that names no other, behind its last `=`; None otherwise, as for `x = 5, y = 7`."""
    calculation, _, result = normalized(text).rpartition("=")
    if re.search(r"[,;]\s|\b(?:and|or)\b", calculation):
        return None
    numbers = read_numerals(result)
    return numbers[0] if len(set(numbers)) == 1 else None


def read_numerals(text: str) -> list[Fraction | None]:
    """The value of every word of a `normalized` text that holds a digit: None if it is no number by itself, but part of
    a sum, a range, a power, a date, ..., or if it could be read as two, such as `9,5`."""
    raw = ["", "", *re.sub(r"(?<=[^\W_])[^\S\n]*\n", ".\n", text).split(), "", ""]  # A line ends like a sentence.
    words = [word if word in _OPERATORS else without_edges(word) for word in raw]
    is_numeral = [re.search(r"\d", word) is not None and not _NAME.fullmatch(word) for word in words]
    ends = [word[-1:] in ",.:!?)" for word in raw]  # A clause, or the number of a list's item, ends with this word.
    values = []
    for i in filter(is_numeral.__getitem__, range(len(words))):
        before, after, behind = words[i - 1], words[i + 1], words[i + 2]
        is_operand = is_numeral[i + 2] or behind.startswith("\\") or (len(behind) == 1 and behind not in "aAI")
        is_part = (
            before in _OPERATORS
            or before.startswith("\\")
            or (is_numeral[i - 1] and not ends[i - 1])
            or (before in _JOINING and is_numeral[i - 2] and not ends[i - 2])
            or (after in _OPERATORS and is_operand)
            or after.startswith("\\")
            or bool(_SCALES & {after, after.lower()})
            or after.startswith(_EASTERN_SCALES)
        )
        values.append(None if is_part else read_numeral(words[i]))
    return values


def without_edges(word: str) -> str:
    """The word without punctuation and emphasis around it."""
    return _BACK.sub("", _FRONT.sub("", word)[::-1])[::-1]


def read_numeral(word: str) -> Fraction | None:
    """The value of a single word, None if it is no numeral."""
    match = _NUMERAL.fullmatch(word) if len(word) <= MOST_CHARACTERS else None
    if match is None or match["unit"].lower() in _SCALES or (match["bottom"] and not int(match["bottom"])):
        return None
    return Fraction(re.sub("[,'_]", "", match["top"])) / int(match["bottom"] or 1)
