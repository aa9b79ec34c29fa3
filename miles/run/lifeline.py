"""A process that a launcher has started ends with it, however the launcher ends. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

LIFELINE = "MILES_LIFELINE"
"""An open pipe: when its other end closes, whoever started the process is gone."""


def hold_lifeline(environ: Mapping[str, str] = os.environ) -> None:
    """End this process, and what it has started, when whoever started it is gone: nobody would ever stop it."""
    if LIFELINE not in environ:
        return
    lifeline = int(environ[LIFELINE])

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="miles-lifeline", daemon=True).start()
