"""Fetch the evaluation sets of the paper from their public repositories, each at a fixed commit.

    python -m d3s_megatron.data.fetch --out data            # then: python -m d3s_megatron.evaluate --data data ...

One file a set: JSON lines with id, problem, answer and source. GitHub at a commit and not a dataset hub, as the same
bytes come every time: the result is compared with the checksum of the copy that this project is tested with.
The problems have owners: those of AIME and AMC are the Mathematical Association of America's, Minerva's are MIT
OpenCourseWare's (CC BY-NC-SA).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3s_megatron.data.sets import NUM_PROBLEMS

HOST = "https://raw.githubusercontent.com"
QWEN = "QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data"
TIMEOUT_SECONDS = 60

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a set is published and how its rows become ours."""

    path: str  # owner/repository/commit/path
    licence: str  # of that repository
    name: str  # what `source` says
    sha256: str  # of the file that the mapping gives
    problem: str  # field of the problem
    id: Callable[[int, Row], str]
    answer: Callable[[Row], str]


def _integer(row: Row) -> str:
    """`025`, `27.0` and `336^\\circ` are 25, 27 and 336."""
    return str(int(float(re.sub(r"\^\\circ$", "", str(row["answer"]).strip()))))


def _after_hashes(row: Row) -> str:
    return row["answer"].rpartition("####")[2].strip().replace(",", "")


def _in_the_box(row: Row) -> str:
    """The content of the only box in a solution."""
    text = row["solution"]
    start = text.index(r"\boxed{") + len(r"\boxed{")
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        end += 1
    return text[start : end - 1].strip()


def _only_final_answer(row: Row) -> str:
    """The one entry of final_answer; a pair of $ around the whole of it goes, those of a list stay."""
    (answer,) = row["final_answer"]
    answer = answer.strip()
    return answer[1:-1].strip() if re.fullmatch(r"\$[^$]*\$", answer) else answer


def _numbered(prefix: str, digits: int) -> Callable[[int, Row], str]:
    return lambda number, row: f"{prefix}-{number:0{digits}}"


def _math_id(number: int, row: Row) -> str:
    return "math500-" + row["unique_id"].removeprefix("test/").removesuffix(".json").replace("/", "-")


SOURCES = {
    "aime24": Source(
        f"{QWEN}/aime24/test.jsonl",
        "MIT",
        "aime24",
        "7d5079dc9d2a0db329a8768732301a1a986acb74e9e8d18bc8f513d796de8a74",
        "problem",
        _numbered("aime24", 2),
        _integer,
    ),
    "aime25": Source(
        "ypwang61/One-Shot-RLVR/21ed529ec90002597c92aee957af1dd8166bb66c/Qwen2.5-Eval/evaluation/data/aime25/test.jsonl",
        "Apache-2.0",
        "aime25",
        "d13c074832ebaa3cae00cc0c2236eb6d8cd0163697f9e3fdf47cdbb2a373f8cf",
        "problem",
        _numbered("aime25", 2),
        _integer,
    ),
    "amc23": Source(
        f"{QWEN}/amc23/test.jsonl",
        "MIT",
        "amc23",
        "00bc749db9022ecfd37d666602eb7cd45c2a453971991561c635d48411f7eab4",
        "problem",
        _numbered("amc23", 2),
        _integer,
    ),
    "gsm8k": Source(
        "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl",
        "MIT",
        "gsm8k",
        "de6f8baa42281548344e9173fd469da8e8141b8532cb8ccdbf570e80d61774a0",
        "question",
        _numbered("gsm8k-test", 4),
        _after_hashes,
    ),
    "math500": Source(
        "ZubinGou/math-evaluation-harness/db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5/data/math_oai/test.jsonl",
        "MIT",
        "math500",
        "7969c3952fa41b2512675f2109eec2602ed25133fc8211b89896e4cef2a38462",
        "problem",
        _math_id,
        lambda row: str(row["answer"]).strip(),
    ),
    "minerva": Source(
        f"{QWEN}/minerva_math/test.jsonl",
        "MIT; problems CC BY-NC-SA",
        "minerva_math",
        "c64f84872d49bc9d7dbdfc74a1042992a5081862303e2fb2dbee73fb63e6bad9",
        "problem",
        lambda number, row: f"minerva-{int(row['idx']):03}",
        _in_the_box,
    ),
    "olympiadbench": Source(
        f"{QWEN}/olympiadbench/test.jsonl",
        "MIT",
        "olympiadbench",
        "da1875c0fddace347814fa8b81a90cf8d3720e7883ba783c5ed6ecc7ce160e47",
        "question",
        lambda number, row: f"olympiadbench-{row['id']}",
        _only_final_answer,
    ),
}


def normalised(name: str, published: bytes) -> bytes:
    """The published JSON lines of a set as ours; ValueError where a row is not as expected, or rows are missing."""
    source = SOURCES[name]
    lines = []
    for number, raw in enumerate(line for line in published.decode("utf-8").split("\n") if line.strip()):
        try:
            row = json.loads(raw)
            ours = {
                "id": source.id(number, row),
                "problem": str(row[source.problem]).strip(),
                "answer": source.answer(row),
                "source": source.name,
            }
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: row {number} is not as published before ({type(error).__name__}: {error})"
            ) from error
        lines.append(json.dumps(ours, ensure_ascii=False, separators=(",", ":")) + "\n")
    if len(lines) != NUM_PROBLEMS[name]:
        raise ValueError(f"{name}: {len(lines)} rows came, {NUM_PROBLEMS[name]} were expected")
    return "".join(lines).encode("utf-8")


def fetch(name: str, folder: Path) -> str:
    """Writes folder/NAME.jsonl and returns a line about it; ValueError with a remedy where it cannot be had."""
    source = SOURCES[name]
    url = f"{HOST}/{source.path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            published = answer.read()
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ValueError(
            f"cannot fetch {name} from {url} ({getattr(error, 'reason', error)}); set https_proxy where the network "
            f"needs one, or copy {name}.jsonl (id, problem, answer a line) into {folder} from a machine that can"
        ) from error
    ours = normalised(name, published)
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{name}.jsonl.new"
    beside.write_bytes(ours)
    beside.replace(folder / f"{name}.jsonl")
    same = hashlib.sha256(ours).hexdigest() == source.sha256
    remark = "" if same else "; WARNING: not the bytes that this project was tested with, compare before you report"
    return f"{folder / f'{name}.jsonl'}: {NUM_PROBLEMS[name]} problems ({source.licence}){remark}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 and one line where a set cannot be fetched."""
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.data.fetch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the files")
    parser.add_argument("--sets", default=",".join(SOURCES), help="names with commas between (default: all seven)")
    args = parser.parse_args(argv)
    try:
        names = args.sets.split(",")
        if unknown := [name for name in names if name not in SOURCES]:
            raise ValueError(f"--sets names {', '.join(unknown)}: there are {', '.join(SOURCES)}")
        for name in names:
            print(fetch(name, args.out), flush=True)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
