"""What a person and a scheduler read of a warning."""

from __future__ import annotations

import json
import logging

import pytest

from jobs.logs import setup_logging


@pytest.fixture
def sluice_log():
    return logging.getLogger("sluice.some.part")


def test_warnings_stand_out_from_progress(sluice_log, capsys):
    setup_logging("text")
    sluice_log.info("read sources: %s", "1.0 s")
    sluice_log.warning("late rows: %d", 3)
    progress, warning = capsys.readouterr().err.splitlines()
    assert progress.partition(" ")[2] == "read sources: 1.0 s"
    assert warning.partition(" ")[2] == "warning: late rows: 3"


def test_schedulers_read_the_level(sluice_log, capsys):
    setup_logging("json")
    sluice_log.warning("late rows: %d", 3)
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["message"]) == ("warning", "late rows: 3")
