from __future__ import annotations

import gzip

import pytest

from conf.errors import ConfigError, InputDataError
from etl.conversion.text_files import open_text_input, open_text_output, refuse_damage


def test_names_decide_on_compression(tmp_path):
    with open_text_output(tmp_path / "a.csv.gz") as file:
        file.write(b"a\n1\n")
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == b"a\n1\n"
    with open_text_input(tmp_path / "a.csv.gz") as file:
        assert file.read() == b"a\n1\n"
    for opens in (open_text_input, open_text_output):
        with pytest.raises(ConfigError, match=r"a\.csv\.zlib"):
            opens(tmp_path / "a.csv.zlib")


@pytest.mark.parametrize(
    "data", [b"no gzip", gzip.compress(b"a,b\n" * 9)[:-9]], ids=["no gzip", "cut short"]
)
def test_damage_names_the_file(tmp_path, data):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(data)
    with (
        pytest.raises(InputDataError, match=r"a\.csv\.gz does not decompress"),
        refuse_damage(path),
        open_text_input(path) as file,
    ):
        file.read()


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    path = tmp_path / "a.csv"
    with pytest.raises(FileNotFoundError), refuse_damage(path):
        open_text_input(path)
