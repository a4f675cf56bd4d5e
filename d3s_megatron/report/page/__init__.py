"""The report's page: its HTML, style and script as they are, and how they become one file that asks no network."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

# Nothing is fetched and nothing is sent, whatever stands in a model's answer.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def safe_json(value: Any) -> str:
    """JSON that may stand inside a <script> element, whatever its strings hold."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: other characters are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_page(data: Any, plotly: str) -> str:
    """The whole HTML file; `plotly` is the library's JavaScript."""
    here = files(__package__)
    text = (here / "page.html").read_text(encoding="utf-8")
    assert "</script" not in plotly.lower()
    parts = {
        "POLICY": POLICY,
        "STYLE": (here / "page.css").read_text(encoding="utf-8"),
        "PLOTLY": plotly,
        "DATA": safe_json(data),
        "SCRIPT": (here / "page.js").read_text(encoding="utf-8"),
    }
    before, *rest = text.split("{{")
    pieces = [before]
    for part in rest:
        name, after = part.split("}}", 1)
        pieces += [parts[name], after]
    return "".join(pieces)
