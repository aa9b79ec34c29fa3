"""How a process becomes a rank: it joins the others, and sees to it that all of them run the same thing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import miles
from miles.errors import BadInput
from miles.learn.channel import PATIENCE, Channel
from miles.run.crew import Crew
from miles.run.lifeline import hold_lifeline
from miles.run.place import STORE, Place

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pydantic")
"""What the numbers of a run depend on, beside Miles."""


@contextmanager
def crew_of(place: Place | None, device: torch.device, environ: Mapping[str, str] = os.environ) -> Iterator[Crew]:
    """This process as one of a crew. `place` None: it is alone."""
    if place is None:
        yield Crew(Channel())
        return
    hold_lifeline(environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(environ[STORE], place.size) if STORE in environ else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        init_method=None if store is not None else "env://",
        rank=place.rank,
        world_size=place.size,
        timeout=PATIENCE,
    )
    try:
        yield Crew(Channel.open())
    finally:
        with contextlib.suppress(RuntimeError):  # of a peer that has gone
            dist.destroy_process_group()


def check_alike(crew: Crew, facts: Mapping[str, str]) -> None:
    """Raises BadInput on every rank where the ranks differ in one of the facts, which it names."""
    found = [json.loads(reply) for reply in crew.channel.gather(json.dumps(dict(facts)).encode())]
    crew.together(lambda: _compare(found))


def packages() -> dict[str, str]:
    """What is installed here, by name."""
    sources = hashlib.sha256()
    root = Path(miles.__file__).parent
    for path in sorted(root.rglob("*.py")):
        sources.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"miles (its files)": sources.hexdigest()[:16], "python": platform.python_version(), **installed}


def _compare(found: Sequence[Mapping[str, str]]) -> None:
    for name in found[0]:
        for rank, facts in enumerate(found):
            if facts.get(name) != found[0][name]:
                raise BadInput(
                    f"the ranks do not run the same: {name} is {found[0][name]} on rank 0 and {facts.get(name)} on rank "
                    f"{rank}. Install the same packages and put the same files on every machine, then start again."
                )
