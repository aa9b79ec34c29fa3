"""Records go into the log file and, from warnings up, to the person who watches; a full disk costs only the lines."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from miles.run.logs import logs_to, said

log = logging.getLogger("miles.tests")


def test_all_records_are_kept_and_warnings_said(tmp_path):
    told: list[str] = []
    path = tmp_path / "logs" / "main.log"
    level = logging.getLogger("miles").level
    with logs_to(path, told.append):
        log.info("quiet %d", 1)
        log.warning("loud")
    log.warning("after the run")
    assert told == ["warning: loud"]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO miles.tests: quiet 1", "WARNING miles.tests: loud"]
    assert logging.getLogger("miles").level == level


def test_before_there_is_a_file_infos_are_said_too():
    told: list[str] = []
    with said(told.append):
        log.info("converting")
        log.error("broken")
    assert told == ["converting", "error: broken"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_no_traceback(capsys):
    told: list[str] = []
    with logs_to(Path("/dev/full"), told.append):
        log.warning("loud")
    assert told == ["warning: loud"]
    assert capsys.readouterr().err == ""
