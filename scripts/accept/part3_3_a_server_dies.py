"""Two servers, one killed with -9 while the run goes on: the run ends well, and nothing stays behind."""

from __future__ import annotations

import sys

from common import check, finish, run


def main() -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "tests/run/test_vllm_run.py"])
    check("a run on two servers outlives one", done.stdout.strip().splitlines()[-1], "1 passed" in done.stdout)
    finish()


if __name__ == "__main__":
    main()
