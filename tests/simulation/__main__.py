"""`python -m tests.simulation SEED...` runs single seeds and prints their results. `A-B` is a range."""

import sys

from tests.simulation.run import Broken, run


def main(words: list[str]) -> int:
    """Run the seeds; return how many went wrong."""
    failed = 0
    for word in words:
        first, _, last = word.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            try:
                print(f"seed {seed}: {run(seed)}")
            except Broken as broken:
                failed += 1
                print(broken)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
