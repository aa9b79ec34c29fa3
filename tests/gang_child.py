"""One rank of a test: joins a gloo group through a file, calls one function of a test module, and writes what it returns."""

from __future__ import annotations

import datetime
import json
import os
import runpy
from pathlib import Path

import torch
import torch.distributed as dist

job = globals()["job"]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
store = dist.FileStore(job["store"], job["size"])
patience = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["size"], timeout=patience)
result = runpy.run_path(job["module"])[job["function"]](*job["arguments"])
Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
dist.barrier()
dist.destroy_process_group()
