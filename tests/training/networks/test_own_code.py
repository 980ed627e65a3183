"""Whose fault an error is: code of one's own, or Sluice's, wherever that is installed."""

from __future__ import annotations

import pytest

from conf.errors import OwnCodeError
from training.networks import own_code
from training.networks.own_code import explain_error

TEXT = """Graph execution error:

Detected at node MatMul defined at (most recent call last):
  File "{script}", line 8, in <module>

  File "{sluice}training/loop/step.py", line 90, in _compute
{last}
OOM when allocating tensor
"""


@pytest.mark.parametrize("is_installed", [True, False])
def test_an_error_of_a_step_is_not_blamed_on_the_command(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_code._SLUICE[0].removesuffix("conf/")
    if is_installed:
        monkeypatch.setattr(own_code, "_LIBRARIES", (*own_code._LIBRARIES, folder))
    names = {"script": "/usr/local/bin/sluice", "sluice": folder}
    assert explain_error(RuntimeError(TEXT.format(**names, last=""))) is None
    own = '  File "/home/me/losses.py", line 3, in focal\n'
    found = explain_error(RuntimeError(TEXT.format(**names, last=own)))
    assert isinstance(found, OwnCodeError)
    assert "/home/me/losses.py:3" in str(found)
