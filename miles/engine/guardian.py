"""Runs one command for as long as the process that started this one lives, and takes its whole process group down after.

Started by path with a bare interpreter, so it imports the standard library alone. Its stdin is a pipe whose other end the
starter holds: however the starter ends, kill -9 included, the pipe ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    """Run `command` in a session of its own; end with its exit code (128 + n after signal n)."""
    # A keyboard's Ctrl-C goes to the starter, which decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # One thread so far, so that a function between fork and exec is safe.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_me)
    threading.Thread(target=_end_with_starter, args=(child,), daemon=True).start()
    code = child.wait()
    _signal_group(child, signal.SIGKILL)  # what the command has left behind
    os._exit(code if code >= 0 else 128 - code)


def _end_with_starter(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    _signal_group(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    _signal_group(child, signal.SIGKILL)


def _signal_group(child: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _end_with_me() -> None:
    """Linux: also where this process itself is killed. The child inherits ignored signals, which it must not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
