"""Errors carry what the user needs, and their exit codes are distinct."""

from __future__ import annotations

import pickle

import pytest

from conf import errors

LEAVES = [
    errors.ConfigError,
    errors.InputDataError,
    errors.UpstreamNotReadyError,
    errors.TrainingDivergedError,
    errors.InternalError,
]


def test_message_names_each_part():
    error = errors.ConfigError("bad", received=3, allowed="1 or 2", fix="say 2")
    text = str(error)
    for part in ("bad", "received: 3", "allowed:  1 or 2", "fix:      say 2"):
        assert part in text


def test_unknown_parts_are_left_out():
    assert str(errors.ConfigError("bad")) == "bad"


def test_exit_codes_are_distinct_and_never_success():
    codes = [cls.exit_code for cls in LEAVES]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


@pytest.mark.parametrize("cls", LEAVES)
def test_errors_survive_a_process_border(cls):
    error = cls("bad", received=1, allowed=2, fix="x")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", "did you mean 'temperature'?"), ("zzz", "use one of: ")]
)
def test_hint_names_the_nearest_or_all(name, hint):
    assert errors.did_you_mean(name, ["temperature", "dropout"]).startswith(hint)
