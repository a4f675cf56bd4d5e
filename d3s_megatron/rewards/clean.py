r"""One spelling for what LaTeX and Unicode let people write in many ways; no meaning changes here.

`clean` keeps single spaces, for `2 3/4` is not `23/4`; `squeeze` then drops them, for comparing spellings.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/",
    "⁄": "/", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", 
    "μ": r"\mu ",
    "ω": r"\omega ", "φ": r"\phi ", "σ": r"\sigma ", "τ": r"\tau ", "ρ": r"\rho ", "Δ": r"\Delta ", "δ": r"\delta ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "∓": r"\mp ", "∅": r"\emptyset ", "°": r"^\circ ", "º": r"^\circ ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "ℝ": r"\mathbb{R}", "、": ",", "。": ".", "∠": r"\angle ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    "\u200b": "", "\ufeff": "",
}  # fmt: skip
_CHARACTERS |= {chr(0xFF01 + k): chr(0x21 + k) for k in range(94)}  # full-width forms of ASCII
_CHARACTERS |= {chr(k): " " for k in range(32)}
_TRANSLATION = str.maketrans(_CHARACTERS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

# "..., k \\in \\mathbb{Z}" behind an answer says what its letter stands for
_DOMAIN = re.compile(
    r"(?<=\S)(?:,|\\text\{\s*(?:where|for|with)\s*\}|\\q?quad|\s){1,8}[a-z]\s*\\in\s*\\mathbb\s*\{?[ZNQRC]\}?[\s.$]*$"
)
_GREEK = "alpha|beta|gamma|theta|lambda|mu|rho|sigma|tau|omega|phi"
_REALS = re.compile(r"\\mathbb\s*\{?R\}?|\\R(?![a-zA-Z])|^\s*\\text\{\s*all reals?(?: numbers)?\s*\}\s*$")
_RULES: list[tuple[re.Pattern[str], Any]] = [
    (_DOMAIN, ""),
    (_REALS, r"(-\\infty,\\infty)"),
    (re.compile(r"^\s*(?:=|\\approx|\\simeq|\\sim)(?![a-zA-Z])\s*"), ""),
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+"), lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}"),
    (re.compile(r"[₀₁₂₃₄₅₆₇₈₉]+"), lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}"),
    (re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile("√"), r"\\sqrt "),
    # thousands, while their marks can still be told from other commas and spaces
    (re.compile(r"(?<=\d)(?:\{,\}|,\s*\\!|\\[,!]|\{\\,\})\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\{)\d{1,3}(?:,\d{3})+(?=\})"), lambda m: m.group().replace(",", "")),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # the decimal comma as TeX users write it
    (re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|boldsymbol|mathbf|mathbb|mathit|phantom\{[^{}]*\})"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;:!> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|hspace\{[^{}]*\})|~|\s+"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"\\(?:mathrm|textrm|textbf|textit|textnormal|textsf|mbox|hbox|operatorname\*?|rm)\s*\{"), r"\\text{"),
    (re.compile(r"\\text\s+\{"), r"\\text{"),
    (re.compile(r"\\(?:boxed|fbox)\s*\{"), "{"),
    (re.compile(r"(?<=\\text\{)[^{}]*\^\{-?\d\}[^{}]*(?=\})"), lambda m: re.sub(r"\^\{(-?\d)\}", r"^\1", m.group())),
    (re.compile(r"(?<=\d)\s*\^\s*\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\s*\}?"), ""),
    (re.compile(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}"), r"\\text{\1/\2}"),
    (re.compile(r"^\s*\\text\{[^{}]*(?:\bis|\bare|[:=])\s*\}(?=.*\S)"), ""),
    (re.compile(r"^\s*\\text\{(\s*(?:\\\$)?[-+(.]?\s*\d[^{}]*)\}\s*$"), r"\1"),
    (re.compile(r"\\text\{\s*([.,;:]*)\s*\}"), r" \1 "),
    (re.compile(r"\\text\{([ei])\}"), r"\1"),
    (re.compile(r",?\s*\\text\{\s*,?\s*(?:and|or)\s*\}"), ", "),
    (re.compile(r",?\s+(?:and|or)\s+(?=[^a-zA-Z]|[a-zA-Z]\b)"), ", "),
    (re.compile(r"\\text\{a(sin|cos|tan)\s*\}"), r"\\arc\1 "),
    (re.compile(r"^(?:\s*\(\d\)){2,}\s*$"), lambda m: ", ".join(re.findall(r"\(\d\)", m.group()))),  # of statements
    (re.compile(r"(?<=\d:\d\d)\s*\(?([ap])\.?\s?m\b\.?\)?", re.IGNORECASE), r"\\text{\1m}"),
    (re.compile(r"\\text\{(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|max|min)\s*\}"), r"\\\1 "),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\lt(?![a-zA-Z])|&lt;"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])|&gt;"), ">"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\\(?:lbrace|\{)"), r"\\{"),
    (re.compile(r"\\(?:rbrace|\})"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\lbrack(?![a-zA-Z])"), "["),
    (re.compile(r"\\rbrack(?![a-zA-Z])"), "]"),
    (re.compile(r"\\(?:varnothing|O(?![a-zA-Z]))|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\(?:degree|deg)(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\(?:cdots|dots|ldots|dotsc|dotsb)(?![a-zA-Z])|…|\.\.\."), r"\\ldots "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\(?:ast|star)(?![a-zA-Z])"), "*"),
    (re.compile(r"(?<![a-zA-Z\\])(?:np|numpy|math|sympy)\.(?=[a-z])"), ""),
    (re.compile(r"(?<![a-zA-Z\\])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp)(?![a-z])"), r"\\\1 "),
    (re.compile(r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])"), r"\\sqrt"),
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(rf"(?<![a-zA-Z\\])({_GREEK})(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"^\s*([a-z])\s*(?=(?:\[[^()\[\]]*,[^()\[\]]*[\])]|\([^()\[\]]*,[^()\[\]]*\])\s*$)"), r"\1\\in "),
    (re.compile(r"^\s*\]([^()\[\]]*,[^()\[\]]*)(?=[\[\]]\s*$)"), r"(\1"),
    (re.compile(r"^(\s*[(\[][^()\[\]]*,[^()\[\]]*)\[\s*$"), r"\1)"),
    (re.compile(r"\s+"), " "),
]  # fmt: skip

_MOST_GROUPS = 8  # pairs of braces around the whole text that are worth taking off
_BRACED_ATOM = re.compile(r"(?<=[\^_])\{([a-zA-Z0-9])\}")


@lru_cache(maxsize=256)  # a group of rollouts shares its gold
def clean(text: str) -> str:
    """The usual spelling of an answer; dollar signs around mathematics go, those of money become `\\$`."""
    text = text.translate(_TRANSLATION)
    text = _drop_math_signs(text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z]{2})", r"\\", text)  # \\\\frac: a backslash escaped twice
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _without_trailing_marks(text)
    for _ in range(_MOST_GROUPS):
        if (inner := _whole_group(text)) is None:
            break
        text = _without_trailing_marks(inner)
    return text


def squeeze(text: str) -> str:
    """A cleaned text without its optional spaces and braces, so that equal spellings are equal strings."""
    text = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])", r"\1\0", text)  # the space after \pi in "\pi r" is needed
    text = re.sub(r"(?<=\d) (?=\d)", "\0", text)
    return _BRACED_ATOM.sub(r"\1", text.replace(" ", "").replace("\0", " "))


def _without_trailing_marks(text: str) -> str:
    while (shorter := text.strip().rstrip(".,;:").removesuffix(r"\\")) != text:
        text = shorter
    return text


def _drop_math_signs(text: str) -> str:
    text = re.sub(r"\\[()]|\\\[|(?<!\\)\\\](?!\])", " ", text) if re.search(r"\\[(\[]", text) else text
    text = text.replace("$$", " ")
    unescaped = re.findall(r"(?<!\\)\$", text)
    if len(unescaped) == 1 and re.search(r"(?<!\\)\$\s*\.?\d", text):  # one sign before a number is money
        return re.sub(r"(?<!\\)\$", r"\\$", text)
    return re.sub(r"(?<!\\)\$", " ", text)


def _whole_group(text: str) -> str | None:
    """What is inside, where one pair of braces or one `\\text{...}` with a number holds the whole text."""
    if not (text.startswith("{") and text.endswith("}")) or text.endswith(r"\}"):
        return None
    depth = 0
    for position, character in enumerate(text):
        if character in "{}" and not (position and text[position - 1] == "\\"):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[1:-1] if position == len(text) - 1 else None
    return None
