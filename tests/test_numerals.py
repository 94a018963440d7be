# SPDX-License-Identifier: Apache-2.0
"""Numbers in answers: which spellings are the same number, and what is no single number. Each row has its reason."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rewards
from grpo.numerals import gold_number, number_of

NUMBERS = [  # (answer, number, reason)
    ("$9{,}500", 9500, "LaTeX's comma between thousands"),
    (r"9\,500", 9500, "LaTeX's thin space"),
    (r"9,\!500", 9500, "LaTeX's negative space"),
    ("9 500", 9500, "a space between thousands"),
    ("9\u00a0500 km", 9500, "a no-break space"),
    ("9\u202f500.5", Fraction(19001, 2), "a narrow no-break space, and a decimal point"),
    ("9'500", 9500, "an apostrophe between thousands"),
    ("so $1,050.00.", 1050, "currency, cents and the sentence's stop"),
    (r"\$1,234,567", 1234567, "an escaped dollar"),
    ("US$5", 5, "a currency of two letters and a sign"),
    ("5€", 5, "currency behind"),
    ("−5", -5, "the minus sign of mathematics"),
    ("–5", -5, "a dash in its place"),
    ("-$3", -3, "a sign before the currency"),
    ("$-3$", -3, "dollars around a formula"),
    ("x = - 5", -5, "a sign with a space, behind ="),
    ("#### - 5", -5, "a sign with a space, where nothing else stands"),
    ("+5", 5, "plus"),
    ("the answer—42", 42, "a long dash is no minus"),
    ("42 - great!", 42, "a dash before a word"),
    ("3/4", Fraction(3, 4), "a fraction"),
    (r"\frac{3}{4}", Fraction(3, 4), "LaTeX's fraction"),
    (r"-\dfrac34", Fraction(-3, 4), "the same without braces"),
    (r"3\frac{1}{4}", Fraction(13, 4), "a mixed number"),
    ("5 1/2", Fraction(11, 2), "a mixed number in plain text"),
    ("5½", Fraction(11, 2), "a fraction of one character"),
    (".75", Fraction(3, 4), "no digit before the point"),
    ("1e3", 1000, "an exponent, as JSON may write it"),
    ("50%", 50, "percent signs are ignored"),
    (r"50\%", 50, "escaped ones too"),
    ("１２", 12, "full-width digits"),
    ("答えは42円です。", 42, "no spaces between words"),
    ("**42**", 42, "emphasis"),
    ("6 boxes of 7\n42", 42, "a line of its own"),
    ("* 42 apples", 42, "the bullet of a list"),
    ("<answer>42</answer>", 42, "tags"),
    ("42kg", 42, "a unit without a space"),
    ("42 cm^2", 42, "a unit's power"),
    (r"45^\circ", 45, "degrees"),
    ("Answer:42", 42, "no space behind the colon"),
    ("In 2024, 42 people came, as in room B12.", 42, "B12 is a name"),
    ("6 * 7 = 42", 42, "the result of a calculation"),
    ("<<6*7=42>>42 left", 42, "GSM8K's calculator"),
    ("#### 41\nNo:\n#### 42", 42, "the last mark counts"),
    ("#### 42 ####", 42, "closing marks"),
    ("#### Answer\n42\nCheck: 84 / 2 = 42, so 2 * 42 = 84.", 42, "the first line with a digit behind the mark"),
    (r"So \boxed{42}: 6 boxes of 7.", 42, "a box counts before the last number"),
    (r"\boxed{41} or rather \boxed{x = 42\text{ kg}}", 42, "the last box, a name and a unit"),
]
NO_NUMBERS = [
    ("", "nothing"),
    ("42 #### none", "a mark without a number counts more than a number without a mark"),
    ("x^2+1", "a polynomial is not its last number"),
    ("2x", "a product with a variable"),
    (r"2\pi", "no decimal number"),
    (r"\sqrt{5}", "a root is not its radicand"),
    ("5²", "a power is not 52"),
    ("1.5 × 10^6", "a product"),
    ("20 + 6", "a sum without its result"),
    ("5-10", "a range is not -10"),
    ("5–10", "a range with a dash"),
    ("5 to 10", "a range in words"),
    ("42 or 43", "two answers: hedging must not pay"),
    ("#### 42 of 50", "two numbers behind the mark"),
    (r"\boxed{1, 2}", "two numbers in the box"),
    ("(1, 2)", "a point"),
    ("9,5", "9.5 where a comma is the decimal point, else a slip"),
    ("9.500,00", "9,500.00 in other countries"),
    ("1,00,000", "groups of two digits"),
    ("9٬500", "a separator that is not known is not skipped"),
    ("12 34", "not in groups of three"),
    ("3 million", "3 or 3,000,000"),
    ("3万", "30,000"),
    ("12:30", "a time"),
    ("2024-01-05", "a date"),
    ("5'10\"", "feet and inches"),
    ("0x10", "hexadecimal"),
    ("±5", "two numbers"),
    ("> 5", "an inequality"),
    ("#### x = 5, y = 7", "two results"),
    (r"\boxed{x=5 \text{ or } x=7}", "two solutions"),
    ("minus 5", "a sign in words"),
    ("7 times 6", "a product in words"),
    ("5 squared", "a power in words"),
    (r"0.\overline{3}", "a decimal that never ends"),
    ("$1.5M", "millions"),
    ("42 [1]", "a footnote"),
    ("5+", "at least 5"),
    ("Answer - 42", "a dash or a sign"),
    ("- 42", "an item of a list or a sign"),
    ("1/0", "no number"),
    ("1" * 5000, "more digits than Python reads"),
    ("1e999999999", "more than fits into memory"),
]


@pytest.mark.parametrize(("text", "number", "reason"), NUMBERS)
def test_numbers(text, number, reason):
    assert number_of(text) == number, reason
    assert rewards.gsm8k([f"assistantfinal{text}"] * 2, answer=[str(number), str(number + 1)]) == [1.0, 0.0]


@pytest.mark.parametrize(("text", "reason"), NO_NUMBERS)
def test_what_is_no_number(text, reason):
    assert number_of(text) is None, reason
    assert gold_number(text) is None, reason
    with pytest.raises(ValueError, match="the column `answer` is not one number"):
        rewards.gsm8k(["assistantfinal42"], answer=[text])


STRICT = [  # (answer, whether `gsm8k` and `gsm8k_strict` take it for 1050)
    ("so\n#### 1050", True, True), ("####1,050 apples", True, True), ("#### 1 is wrong. #### 1050.0", True, True),
    ("so 1050", True, False), ("\\boxed{1050}", True, False), ("#### $1050", True, False), ("#### 1050.", True, False),
    ("#### 1 #### 2", False, False), ("####", False, False), ("#### " + "1" * 5000, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "lenient", "strict"), STRICT)
def test_a_strict_answer_says_its_number_behind_the_mark(text, lenient, strict):
    completions, answer = [f"analysis#### 1050assistantfinal{text}"], ["7 * 150 = 1050\n#### 1,050"]
    assert rewards.gsm8k(completions, answer=answer) == [lenient]
    assert rewards.gsm8k_strict(completions, answer=answer) == [strict]
    assert rewards.gsm8k_strict(completions, answer=answer, truncated=[True]) == [0.0]


GOLD = [
    ("Ben has 7 * 6 = <<7*6=42>>42 pens.\n#### 42", 42, "GSM8K's own form"),
    ("42", 42, "the number alone"),
    ("7 + 35 = 42 pens", 42, "behind the last ="),
    ("42.0", 42, "a number of JSON, as text"),
    (
        "7 boxes of 6, so 42",
        None,
        "three numbers and no mark: a completion may end like that, a correct answer may not",
    ),
    ("41, 42", None, "a list"),
    ("nan", None, "JSON's NaN"),
]


@pytest.mark.parametrize(("text", "number", "reason"), GOLD)
def test_correct_answers(text, number, reason):
    assert gold_number(text) == number, reason


@pytest.mark.parametrize("unit", [*" ^!_({[,:=~1.\n", "1 ", "\\boxed{", "\\frac{1", "<a", "(1, "])
def test_no_completion_slows_scoring_down(unit):
    """Each takes milliseconds. Of patterns that begin their search again at each character, one took ten seconds."""
    for head, tail in (("", ""), ("^", ""), ("1", "1")):
        began = time.process_time()
        number_of(head + unit * (20_000 // len(unit)) + tail)
        assert time.process_time() - began < 1


@given(st.text(st.sampled_from("0123456789 .,-+/^*()[]{}\\$%#=\nab½²−frcboxed'\"")))
def test_any_text_has_a_number_or_none(text):
    """And a correct answer never has another number than a completion with the same text."""
    gold = gold_number(text)
    assert gold is None or gold == number_of(text)
