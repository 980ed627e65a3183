import json
import re

import numpy as np
import pytest

from conf.errors import ConfigError
from etl.sample_data.clicks import ClickSampleConfig, write_clicks

SMALL = ClickSampleConfig(sessions=3_000, videos=200, dirty=0.01)
# The grammar as it is documented, read without Sluice's code.
CLICK = r"[1-9]\d*(?:_[1-9]\d*)?"
SESSION = re.compile(rf"{CLICK}(?: {CLICK})*\t{CLICK}")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    out = tmp_path_factory.mktemp("clicks") / "out"
    card = write_clicks(SMALL, out)
    assert json.loads((out / "SAMPLE.json").read_text()) == card
    return card, (out / "clicks.tsv").read_text().splitlines()


def test_card_counts_what_follows_the_grammar_and_what_does_not(lines):
    card, rows = lines
    bad = [row for row in rows if not SESSION.fullmatch(row)]
    assert len(rows) - len(bad) == card["sessions"]["valid"] == 3_000
    assert card["sessions"]["malformed"] == {
        "malformed_entry": sum("__" in row for row in bad),
        "missing_value": sum(row.startswith("_") for row in bad),
        "empty_entry": sum(row.startswith(" ") for row in bad),
    }
    assert len(bad) == card["lines"]["clicks.tsv"] - 3_000 == 30


def test_clicks_stand_in_columns_and_outside_of_them(lines):
    rows = [row for row in lines[1] if SESSION.fullmatch(row)]
    clicks = [click for row in rows for click in re.split(r"[ \t]", row)]
    inside = np.mean(["_" in click for click in clicks])
    assert len(clicks) == 3_000 * 8
    assert inside == pytest.approx(0.75, abs=0.01)
    # Mostly a video's own column: what came before tells where the next click is.
    columns: dict[str, list[str]] = {}
    for click in clicks:
        video, _, column = click.partition("_")
        if column:
            columns.setdefault(video, []).append(column)
    often = [max(map(own.count, set(own))) / len(own) for own in columns.values() if len(own) > 50]
    assert 0.75 < np.mean(often) < 0.95


def test_bytes_hang_on_the_config_alone(tmp_path):
    def text(config: ClickSampleConfig, name: str) -> bytes:
        write_clicks(config, tmp_path / name)
        return (tmp_path / name / "clicks.tsv").read_bytes()

    assert text(SMALL, "a") == text(SMALL, "b")
    assert text(ClickSampleConfig(3_000, 200, seed=8), "c") != text(
        ClickSampleConfig(3_000, 200, seed=7), "d"
    )


@pytest.mark.parametrize("wrong", [{"sessions": 1}, {"dirty": 0.9}, {"seed": -1}, {"videos": 4}])
def test_refuses_what_is_out_of_range(wrong):
    with pytest.raises(ConfigError, match="out of range"):
        ClickSampleConfig(**wrong)
