"""How CPU threads wait for each other; to be called before torch is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def wait_passively(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait for another sleep instead of spin, unless the user has said how they should wait.

    OpenMP reads this when torch is imported. Spinning gains nothing here and costs dearly as soon as any other program
    wants a core: on two cores with a third busy thread, thin matrix products took 13 times as long.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys():
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
