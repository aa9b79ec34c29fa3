"""One command of `miles` in a process of its own; the global `job` says which, and where its output goes."""

from __future__ import annotations

import os
import resource
import signal
import sys

from miles.__main__ import main

job = globals()["job"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background are started with it ignored
log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(log, 1)
os.dup2(log, 2)
os.chdir(job.get("cwd", "."))
os.environ.update(job.get("environ", {}))
if "file_limit" in job:
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], resource.RLIM_INFINITY))
for stream in job.get("closed", ()):
    os.close(stream)
    setattr(sys, {1: "stdout", 2: "stderr"}[stream], None)
sys.exit(main(job["arguments"]))
