"""Properties of the comparison: it knows equal numbers however they are written, and unequal ones however close."""

from fractions import Fraction

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.rewards.equal import equal, is_parsable
from d3s_megatron.rewards.evaluation import TooLarge, evaluate, exact, precision
from d3s_megatron.rewards.expression import read_expression
from d3s_megatron.rewards.numbers import read_number

INTEGERS = st.integers(-(10**9), 10**9)
FRACTIONS = st.builds(Fraction, INTEGERS, st.integers(1, 10**6))


def spellings(value: Fraction) -> list[str]:
    n, d = value.numerator, value.denominator
    return [rf"\frac{{{n}}}{{{d}}}", f"{n}/{d}", rf"\dfrac{{{3 * n}}}{{{3 * d}}}", rf"{n} \div {d}", rf"({n})/({d})"]


@settings(deadline=None)
@given(FRACTIONS)
def test_a_fraction_equals_itself_in_every_spelling(value):
    assert all(equal(gold, answer) for gold in spellings(value) for answer in spellings(value))


@settings(deadline=None)
@given(FRACTIONS, FRACTIONS)
def test_fractions_are_equal_only_where_their_values_are(a, b):
    assert equal(spellings(a)[0], spellings(b)[1]) == (a == b)


@settings(deadline=None)
@given(st.integers(1, 10**15), st.integers(3, 40))
def test_the_last_digit_of_a_decimal_counts(digits, places):
    a, b = (f"0.{number:0{places}d}" for number in (digits % 10**places, (digits + 1) % 10**places))
    assert not equal(a, b)


@settings(deadline=None)
@given(st.integers(-200, 200), st.integers(-200, 200), st.integers(-200, 200))
def test_expanded_and_factored_forms_are_equal(a, b, c):
    expanded = f"x^2 + ({a + b}) x + ({a * b})"
    assert equal(f"(x+({a}))(x+({b}))", expanded)
    assert equal(f"(x+({a}))(x+({b}))", f"(x+({a}))(x+({c}))") == (b == c)


@settings(deadline=None)
@given(st.lists(INTEGERS, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_order_matters_in_tuples_and_not_in_lists(values, random):
    shuffled = random.sample(values, len(values))
    gold, answer = ("; ".join(map(str, row)) for row in (values, shuffled))
    assert equal(gold, answer)
    assert equal(f"({gold})", f"({answer})") == (values == shuffled)


@settings(deadline=None)
@given(INTEGERS)
def test_thousands_marks_change_nothing(value):
    assert equal(str(value), f"{value:,}")
    assert equal(f"{value:,}".replace(",", "{,}"), str(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", Fraction(1, 2)), (".5", Fraction(1, 2)), ("-3", Fraction(-3)), ("1,234.5", Fraction(2469, 2)),
        ("2.5e-3", Fraction(1, 400)), (r"2 \times 10^{3}", Fraction(2000)), ("10^{-2}", Fraction(1, 100)),
        (r"2\frac{3}{4}", Fraction(11, 4)), ("2 3/4", Fraction(11, 4)), (r"0.\overline{3}", Fraction(1, 3)),
        (r"0.1\overline{6}", Fraction(1, 6)), ("3 8/5", None), ("1/0", None), ("x", None), ("", None), (".", None),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly(text, value):
    number = read_number(text)
    assert (number and number.value) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\sqrt{2}\cdot\sqrt{8}", 4),
        (r"\sin\frac{\pi}{6}", 0.5),
        (r"\log_2 8", 3),
        (r"e^{i\pi}", -1),
        (r"\sqrt[3]{-8}", -2),
        ("|3-5|", 2),
        (r"\lfloor 2.7 \rfloor + \lceil 2.1 \rceil", 5),
        ("5!!", 15),
        (r"\sin^{-1} 1 \cdot 2/\pi", 1),
    ],
)
def test_expressions_have_the_right_value(text, value):
    with precision():
        assert abs(evaluate(read_expression(text), {}, True) - value) < mpmath.mpf(10) ** -50


def test_exact_values_have_a_limit():
    assert exact(read_expression("2^{1009}-2^{1008}")) == 2**1008
    with pytest.raises(TooLarge):
        exact(read_expression("9^{9^{9}}"))


@pytest.mark.parametrize(
    "gold", ["", " ", r"\frac{1}{", r"\frac{}{3}", "3 +* 4", "x^", "?", "-", r"\text{}", "{}", "()"]
)
def test_golds_that_do_not_parse(gold):
    assert not is_parsable(gold)
    assert not equal(gold, "5")


@pytest.mark.parametrize(
    "gold", ["5", "x=5", r"\text{no solution}", "(-\\infty, 2]", "210_5", "C", r"\{1,2\}", "3:4", r"\emptyset"]
)
def test_golds_that_parse(gold):
    assert is_parsable(gold)
