"""Where the roles of one run meet: the buffer's service, and the folder that new weights are published in. Imports no torch.

A launcher tells the roles that it starts by two variables of the environment, so that the recipe stays as its user wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.buffer.backend import LOCAL, Where, open_payloads
from miles.buffer.ledger import DEFAULT_RUN
from miles.buffer.payloads import Payloads
from miles.buffer.serve import TOKEN_VARIABLE
from miles.buffer.transport import Address
from miles.config import schema
from miles.config.schema import Recipe
from miles.errors import ConfigError
from miles.web.listen import read_tokens

BUFFER = "MILES_LAUNCHED_BUFFER"
"""Address of the service that the launcher has started."""
WEIGHTS = "MILES_LAUNCHED_WEIGHTS"
"""Folder that the learner publishes to."""


@dataclass(frozen=True)
class Meeting:
    """`url`: the buffer's service. `weights`: None where engines are given their weights in another way."""

    url: str
    run: str
    weights: Path | None
    section: schema.Buffer

    @classmethod
    def of(cls, recipe: Recipe, environ: Mapping[str, str] = os.environ) -> Meeting:
        """Raises ConfigError where a role that stands alone is not told where the others are."""
        buffer, publish = recipe.buffer, recipe.publish
        url = environ.get(BUFFER, buffer.url)
        weights = environ.get(WEIGHTS, publish.directory)
        problems = []
        if url is None:
            problems.append(
                "buffer.url is not set: a role that stands alone meets the others at a buffer service. Start one with `miles "
                "buffer`, which prints its address; `miles train` starts everything itself"
            )
        if weights is None and recipe.engine.kind == "inprocess" and recipe.run.parts is None:
            problems.append(
                'publish.directory is not set: collectors with engine.kind = "inprocess" keep a copy of the weights, and the '
                "learner writes each new version into that folder, which all of them must reach"
            )
        if problems or url is None:
            raise ConfigError(problems)
        folder = None if weights is None else Path(weights).expanduser()
        return cls(url, buffer.run or DEFAULT_RUN, folder, buffer)

    def address(self, environ: Mapping[str, str] = os.environ) -> Address:
        """With the token for it. Raises BadInput."""
        return address_of(self.section, self.url, self.run, environ)

    def payloads(self) -> Payloads | None:
        """The service's object store, where this role reaches it itself. Raises BadInput."""
        return payloads_of(self.section)


def payloads_of(section: schema.Buffer) -> Payloads | None:
    """Where large groups go without passing through the service; None: they pass through it. Raises BadInput."""
    return None if section.payloads == LOCAL else open_payloads(Path(), Where(payloads=section.payloads))


def address_of(section: schema.Buffer, url: str, run: str, environ: Mapping[str, str] = os.environ) -> Address:
    """A run at a service, and the token for it. Raises BadInput."""
    tokens = read_tokens(None if section.token_file is None else Path(section.token_file), environ, TOKEN_VARIABLE)
    return Address(url, run, tokens[0] if tokens else None, None if section.ca_file is None else Path(section.ca_file))
