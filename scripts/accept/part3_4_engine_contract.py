"""The engine contract holds for the in-process engine, for a fake server and for real vLLM."""

from __future__ import annotations

import sys

from common import check, finish, run

FILES = ["tests/engine/test_engine_contract.py", "tests/engine/test_vllm_contract.py"]


def main() -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "-rA", *FILES])
    for name in ("TestInProcessEngine::", "TestVllmEngineWithAFakeServer::", "TestVllmEngineWithRealVllm::"):
        passed = sum(line.startswith("PASSED") and name in line for line in done.stdout.splitlines())
        check(f"tests passed by {name[:-2]}", passed, passed >= 15)
    finish()


if __name__ == "__main__":
    main()
