"""Threads wait passively unless the user says otherwise."""

from __future__ import annotations

import pytest

from miles.run.threads import wait_passively


def test_threads_sleep_while_they_wait():
    environ: dict[str, str] = {}
    wait_passively(environ)
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}])
def test_what_the_user_said_stays(said):
    environ = dict(said)
    wait_passively(environ)
    assert environ == said
