"""One HTML file of one run or several, finished or going on: curves, what selection did, and rollouts token by token.

    python -m d3s_megatron.report RUN [RUN ...] -o report.html

The file holds everything and asks no network. RUN is the output folder of d3s_megatron.train (log.jsonl, config.yaml,
audit/), or a folder of results of d3s_megatron.evaluate for the table beside the paper.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from d3s_megatron.report.collect import Skipped, collect
from d3s_megatron.report.log_file import LOG_FILE
from d3s_megatron.report.page import make_page

TOKENS = 150_000  # about 4 MB of page


def names_of(folders: Sequence[Path]) -> dict[str, Path]:
    """A short name for each folder: its last parts, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, folders, strict=True))
    raise ValueError("the same folder is given twice: name each run once")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of an evaluation")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="file to write (report.html)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        metavar="NUM",
        help=f"most tokens shown one by one, over all runs ({TOKENS}); at least one step of each is shown",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Writes the report; exit code 2 where there is nothing to report on."""
    args = make_parser().parse_args(argv)
    skipped = Skipped()
    try:
        folders = names_of(args.runs)
        for folder in args.runs:
            if not any((folder / name).is_file() for name in (LOG_FILE, "summary.csv")):
                raise ValueError(f"{folder} is no run: it holds neither {LOG_FILE} nor summary.csv")
        try:
            from plotly.offline import get_plotlyjs
        except ImportError as missing:
            raise ValueError(f"the report needs plotly ({missing}): pip install plotly") from missing
        data = collect(folders, args.tokens, skipped)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    data["made"] = f"made {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    beside = args.out.with_name(f".{args.out.name}.new")
    beside.write_text(make_page(data, get_plotlyjs()), encoding="utf-8")
    os.replace(beside, args.out)
    note = f"; left out, as unreadable: {skipped}" if str(skipped) else ""
    print(f"{args.out}: {len(data['runs'])} runs, {args.out.stat().st_size / 1e6:.1f} MB{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
