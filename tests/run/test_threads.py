"""Threads spin briefly, and large tensors get large pages, unless the user says otherwise."""

from __future__ import annotations

import pytest

from miles.run.threads import prepare_process, spin_briefly


def test_threads_spin_for_a_moment_only():
    environ: dict[str, str] = {}
    spin_briefly(environ)
    assert environ == {"GOMP_SPINCOUNT": "10000"}


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}])
def test_what_the_user_said_stays(said):
    environ = dict(said)
    spin_briefly(environ)
    assert environ == said


def test_large_pages_unless_the_user_says_no():
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    prepare_process(environ)
    assert environ["THP_MEM_ALLOC_ENABLE"] == "1"
    environ["THP_MEM_ALLOC_ENABLE"] = "0"
    prepare_process(environ)
    assert environ["THP_MEM_ALLOC_ENABLE"] == "0"
