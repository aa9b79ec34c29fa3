"""How CPU threads wait for each other, and how memory is asked for; to be called before torch is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = "10000"


def prepare_process(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what torch and its libraries read once, unless the user has.

    Large tensors get large pages: the system hands each of them out anew, page by page, and a 135M model's step on two
    cores spent part of its time on that (1.05 to 1.25 times as fast, 5 % more memory; Linux only).
    """
    spin_briefly(environ)
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Let a thread that waits for another spin for a moment and then sleep, unless the user has said how it should wait.

    OpenMP reads this when torch is imported. Its own choice is to spin thirty times as long, which gains nothing and costs
    dearly as soon as any other program wants a core. Two cores, thin matrix products: equally fast on an idle machine
    (without any spinning 1.3 times slower), and several times faster than OpenMP's own choice beside a third busy thread.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPINS
