"""What a run leaves in its folder for others to read: the JSON lines of its log, its summary; imports nothing heavy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LOG_FILE = "log.jsonl"
SUMMARY_FILE = "summary.json"  # written last, so it says that the run is complete


def json_value(value: Any) -> Any:
    """What a log line holds of a value: null for a number that is not finite, so that every line is valid JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log.jsonl, in order; a last line that is still being written is left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
