"""How many simple answers are judged a second, beside plain math-verify in one process.

python tools/bench_rewards.py [--answers 4000] [--num-workers 2]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from d3s_megatron.rewards import RewardConfig, make_reward

HOSTILE = (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(10^{9})!}", r"\boxed{" + "(" * 1500 + "1}")


def simple_answers(num: int) -> list[tuple[str, str]]:
    """(answer text, gold): integers, fractions, decimals, roots and polynomials in turn, half of them right."""
    kinds = (
        lambda k: (rf"{k}", rf"{k}"),
        lambda k: (rf"\frac{{{k}}}{{{k + 1}}}", rf"\frac{{{2 * k}}}{{{2 * k + 2}}}"),
        lambda k: (f"{k / 8}", rf"\frac{{{k}}}{{8}}"),
        lambda k: (rf"{k}\sqrt{{2}}", rf"\sqrt{{{2 * k * k}}}"),
        lambda k: (rf"x^2 + {2 * k}x + {k * k}", rf"(x+{k})^2"),
    )
    items = []
    for k in range(1, num + 1):
        answer, gold = kinds[k % len(kinds)](k if k % 2 else k + 1)
        wrong_answer = kinds[k % len(kinds)](k + 7)[0]
        chosen = answer if k // len(kinds) % 2 else wrong_answer
        items.append((f"Some steps. Hence the answer is $\\boxed{{{chosen}}}$.", gold))
    return items


def time_plain(items: list[tuple[str, str]]) -> tuple[float, int]:
    """Seconds and number of right answers of math-verify with its defaults, in this process."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse("$1$")
    start = time.perf_counter()
    num_right = sum(verify(parse(f"${gold}$"), parse(text)) for text, gold in items)
    return time.perf_counter() - start, num_right


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args()
    items = simple_answers(options.answers)

    start = time.perf_counter()
    with make_reward(RewardConfig(num_workers=options.num_workers)) as reward:
        print(f"start of the pool: {time.perf_counter() - start:.2f} s")
        reward.grade(items[:8])
        start = time.perf_counter()
        num_right = sum(verdict.value > 0 for verdict in reward.grade(items))
        seconds = time.perf_counter() - start
        print(f"pool, {options.num_workers} workers: {len(items) / seconds:.0f} answers/s ({num_right} right)")
        mixed = [(HOSTILE[k // 8 % 3], "7") if k % 8 == 0 else item for k, item in enumerate(items[:512])]
        start = time.perf_counter()
        reward.grade(mixed)
        print(f"512 answers, one in eight hostile: {time.perf_counter() - start:.2f} s")

    plain = items[: max(100, options.answers // 20)]
    seconds, num_right = time_plain(plain)
    print(f"math-verify, this process: {len(plain) / seconds:.0f} answers/s ({num_right} of {len(plain)} right)")


if __name__ == "__main__":
    main()
