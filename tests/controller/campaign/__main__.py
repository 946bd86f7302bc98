"""`python -m tests.controller.campaign`: run seeded fault schedules; exit code 1 if one breaks an invariant."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.controller.campaign.simulation import Simulation

PROGRESS_SECONDS = 10.0


def seeds(text: str) -> range:
    """FIRST:LAST, the last one not included."""
    first, _, last = text.partition(":")
    try:
        found = range(int(first), int(last))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 0:10000") from error
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no seed; LAST must be larger than FIRST")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.controller.campaign", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=range(200), metavar="FIRST:LAST", help="0:200 if not given")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell what happens")
    given = parser.parse_args(arguments)
    chosen = given.seeds if given.seed is None else range(given.seed, given.seed + 1)
    failed: list[int] = []
    turns = legs = 0
    outcomes: Counter[str] = Counter()
    began = spoken = time.monotonic()
    for done, seed in enumerate(chosen, 1):
        try:
            result = Simulation(seed, print if given.verbose else None).run()
        except Exception:
            failed.append(seed)
            traceback.print_exc()
            print(f"seed {seed} failed; replay it with: python -m tests.controller.campaign --seed {seed} -v")
            continue
        turns, legs = turns + result.turns, legs + result.legs
        outcomes += result.outcomes
        if given.seed is not None:
            print(f"seed {seed}: digest {result.digest}")
        if time.monotonic() - spoken >= PROGRESS_SECONDS:
            spoken = time.monotonic()
            print(f"{done} of {len(chosen)} schedules, {len(failed)} failed, {spoken - began:.0f} s", flush=True)
    print(
        f"{len(chosen)} schedules, {len(failed)} failed, {time.monotonic() - began:.1f} s; "
        f"{turns} turns of controllers, {legs} shadow legs, {outcomes.total()} calls: "
        + ", ".join(f"{count} {what}" for what, count in outcomes.most_common())
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
