from __future__ import annotations

import pytest

from jobs.bench.input.__main__ import build_parser, check_arguments


@pytest.mark.parametrize(
    "arguments", [["--rows", "10"], ["--threads", "0"], ["--repeats", "0"], ["--shapes", "x"]]
)
def test_values_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    parser = build_parser()
    with pytest.raises(SystemExit):
        check_arguments(parser, parser.parse_args(arguments))


def test_the_defaults_are_sound() -> None:
    parser = build_parser()
    check_arguments(parser, parser.parse_args([]))
