#!/usr/bin/env bash
# One GPU, a few minutes, nothing to download: the learner in every mode beside the CPU, its speed and its memory.
# Needs a Python with torch >= 2.11 and Miles' dependencies; writes gpu_check.json (see --help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONPATH=. exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
