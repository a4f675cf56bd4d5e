"""Answers made to hang, to grow or to run: judged in bounded time, without side effects, and never paid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.rewards.extract import final_answer
from d3s_megatron.rewards.math_judge import judge

HOSTILE = {
    "power tower": r"9^{9^{9^{9}}}",
    "tower without braces": "2^" * 500 + "1",
    "tower of symbols": "x^{" * 300 + "x" + "}" * 300,
    "tower of e": "e^{e^{e^{e^{e}}}}",
    "huge power of ten": r"10^{10^{10}}",
    "huge scientific notation": "1e999999999",
    "factorial": r"(10^{9})!",
    "factorial of a factorial": r"((10!)!)!",
    "double factorial": r"(10^{12})!!",
    "binomial": r"\binom{10^{8}}{5\cdot 10^{7}}",
    "logarithm of a tower": r"\log(\log(9^{9^{9^{9}}}))",
    "phase of a huge number": r"\cos(10^{100000})",
    "many digits": "7" * 6000,
    "many decimals": "1." + "0" * 4000 + "1",
    "open brackets": "(" * 1500 + "1",
    "nested brackets": "(" * 1500 + "1" + ")" * 1500,
    "nested fractions": r"\frac{1}{" * 500 + "2" + "}" * 500,
    "nested roots": r"\sqrt" * 900 + "2",
    "nested functions": r"\sin " * 900 + "2",
    "long sum": "1+" * 3000 + "1",
    "long product": "a " * 2400 + "1",
    "many signs": "-" * 4900 + "2",
    "many bars": "|" * 900 + "2",
    "many items": "1," * 4000,
    "many texts": r"\text{a} " * 600,
    "many marks between letters": "a'-" * 1600 + "1",
    "many commands": r"\aa" * 1500 + "=!",
    "many dots": "." * 9000 + "x",
    "many commas": "," * 9000 + "x",
    "many spaces": "2" + r"\ " * 4000 + "3",
    "many money signs": r"\$" * 4000 + "2",
    "many units": r"2\text{ cm}" * 800,
    "many names": "x = " * 2400 + "2",
    "many inequalities": "x < " * 2400 + "2",
    "many unions": r"(1,2) \cup " * 700 + "(1,2)",
    "many matrices": r"\begin{pmatrix}1\end{pmatrix}" * 300,
    "large matrix": r"\begin{pmatrix}" + "2 & " * 2000 + r"2\end{pmatrix}",
    "code": 'open("pwned.txt","w").write("x")',
    "import": '__import__("os").system("touch pwned.txt")',
    "lambda": '(lambda: exec(\'open("pwned.txt","w")\'))()',
    "sum without end": r"\sum_{k=1}^{10^{9}} k^k",
}


# The limits are far from what a judge takes here, and from what 9^9^9^9 does.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_answer_is_wrong(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert judge(rf"So \boxed{{{answer}}}", "1") == (0.0, "wrong")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("gold", [HOSTILE[name] for name in ("power tower", "many digits", "factorial", "binomial")])
def test_what_is_spelled_as_a_large_gold_is_right(gold):
    assert judge(rf"So \boxed{{{gold}}}", gold) == (1.0, "right")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", [r"\boxed{" * 20_000, "{" * 200_000, "<think>" * 50_000, r"\boxed" * 50_000])
def test_the_box_is_found_in_linear_time(text):
    assert final_answer(text) is None


@settings(deadline=None)
@given(st.text(alphabet=r"0123456789xyi+-*/^_=<>(){}[]|\,.! $%&" + "abcdefghijklmnopqrstuvw", max_size=40))
def test_no_text_breaks_the_judge(text):
    value, status = judge(rf"\boxed{{{text}}}", "123454321")
    assert (value, status) in ((0.0, "wrong"), (0.0, "no_answer"))
