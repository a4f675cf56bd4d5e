"""The doctor's command line; exit code 1 where something is wrong, 2 where the question was."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence

LAYOUTS = "tp1,tp2,pp2,tp2pp2,dp2,tp2sp,pp2vpp2,cp2,tp2cp2"


def make_parser() -> argparse.ArgumentParser:
    """`parity` and `env`."""
    from d3s_megatron.doctor.faults import FAULTS

    parser = argparse.ArgumentParser(prog="python -m d3s_megatron.doctor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    parity = commands.add_parser("parity", help="one update per layout, compared with a single process")
    parity.add_argument("--model", default="tiny", help="Hugging Face folder, or tiny for a small random model")
    parity.add_argument("--layouts", default=LAYOUTS, help=f"comma-separated, default {LAYOUTS}")
    parity.add_argument(
        "--actor",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an actor setting for the layouts, not for the single process: layers=transformer_engine, recompute=full",
    )
    parity.add_argument("--tolerance", type=float, default=1e-4, help="largest error that counts as the same")
    parity.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the single process with transformers, too",
    )
    parity.add_argument("--inject", choices=sorted(FAULTS), help="put in a known fault, to see that it is found")
    commands.add_parser("env", help="versions, devices, the extension's state and the first conflict")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit code."""
    args = make_parser().parse_args(argv)
    if args.command == "env":
        from d3s_megatron.doctor.environment import report

        return 0 if report() else 1
    from transformers.utils.logging import disable_progress_bar

    from d3s_megatron.doctor.layouts import parse_settings
    from d3s_megatron.doctor.parity import parity

    disable_progress_bar()
    try:
        settings = parse_settings(args.actor)
        agree = parity(args.model, args.layouts.split(","), args.tolerance, args.plain, args.inject, settings)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    except RuntimeError as failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1
    print("all layouts agree" if agree else "some layouts are wrong")
    return 0 if agree else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
