"""After three publishes of every parameter, tied and untied and as adapters, served and learner log-probs agree; a wrong one is found."""

from __future__ import annotations

import sys

from common import check, finish, run


def main() -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "tests/publish/test_vllm_real.py"])
    passed = "5 passed" in done.stdout and "skipped" not in done.stdout
    check("tests of published weights (fp32 within 1e-3, moved by > 0.3)", done.stdout.strip().splitlines()[-1], passed)
    finish()


if __name__ == "__main__":
    main()
