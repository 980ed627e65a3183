from __future__ import annotations

import numpy as np
import pytest

from conf.errors import ConfigError
from etl.quality.drift import OTHER, Overlay
from jobs.inspection.inspect_dataset import app, find_other
from jobs.reporting.dataset_page import render_dataset, shorten
from jobs.support.run_app import run_app
from tests.jobs.reporting.fixtures import VERSION_ID, FakeConfig, write_dataset, write_run
from tests.jobs.reporting.pages import Page

LATER = "20261102T101500000000Z-0badcafe"
CONTRACT = (
    {"rule": "null_rate users.zip", "severity": "error", "passed": True, "received": "0 null",
     "allowed": "at most 5%"},
    {"rule": "range logs.price", "severity": "warn", "passed": False,
     "received": "<script>7</script>", "allowed": "to 5"},
)  # fmt: skip


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Two versions of a dataset; the later one has other items on top, and a contract."""
    root = tmp_path_factory.mktemp("page")
    earlier = FakeConfig(users=60, items=30)
    later = FakeConfig(users=60, items=12, seed=11, version_id=LATER, contract=CONTRACT)
    write_run(root / "runs", write_dataset(root, earlier), earlier)
    return root / "demo" / "versions" / VERSION_ID, write_dataset(root, later)


@pytest.fixture(scope="module")
def compared(versions):
    earlier, later = versions
    return render_dataset(later, earlier)


def test_the_page_is_well_formed_offline_and_says_what_changed(compared):
    page = Page(compared)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    text = " ".join(page.text)
    assert "1 of 2 rules of its contract are violated." in text
    assert "Drift by feature, the greatest first." in text
    assert "features have shifted" in text or "feature has shifted" in text
    sources = page.values("src") + [h for h in page.values("href") if not h.startswith("#")]
    assert sources == ["data:,"]


def test_what_the_data_says_is_escaped(compared):
    assert "<script>" not in compared
    assert "&lt;script&gt;7" in compared


def test_tokens_stand_for_ids_and_slices_have_both_rates(compared):
    text = Page(compared).text
    assert "Label rate by rating." in text
    assert "Rate before" in text
    assert "Most frequent values of movie_id." in text
    assert any("Item" in part or part.isdigit() for part in text)


def test_equal_versions_have_not_shifted_and_the_page_is_reproducible(versions):
    earlier, _ = versions
    html = render_dataset(earlier, earlier)
    assert html == render_dataset(earlier, earlier)
    assert "0 features have shifted." in html
    assert "It has no contract." in html


def test_alone_and_without_statistics_the_page_still_comes(versions):
    html = render_dataset(versions[0])
    assert "No version to compare with was named" in html


def test_the_other_version_by_id_by_path_and_as_the_previous_one(versions, tmp_path):
    earlier, later = versions
    assert find_other(later, "previous") == earlier.resolve()
    assert find_other(later, VERSION_ID) == earlier.resolve()
    assert find_other(later, str(earlier)) == earlier
    for wrong in ("20200101T0Z-00000000", str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="no such version"):
            find_other(later, wrong)
    with pytest.raises(ConfigError, match="previous"):
        find_other(earlier, "previous")


def test_the_command_writes_one_file_and_is_for_datasets(versions, tmp_path, capsys):
    later = versions[1]
    file = tmp_path / "page.html"
    arguments = [str(later), "--html", str(file), "--against", "previous"]
    assert run_app(app, arguments) == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert file.read_text().startswith("<!doctype html>")
    runs = later.parents[2] / "runs" / "demo"
    assert run_app(app, [str(runs), "--html", str(file)]) == 2
    assert run_app(app, [str(later), "--against", "previous"]) == 2


def laid(names: list[str], before: list[float], after: list[float], ordered: bool = False):
    return Overlay(tuple(names), np.array(before), np.array(after), ordered)


def test_few_values_are_all_shown():
    bars = shorten(laid(["a", "b"], [3, 1], [2, 2]))
    assert (bars.names, bars.before, bars.after) == (["a", "b"], [0.75, 0.25], [0.5, 0.5])
    assert not bars.has_rest


def test_what_was_not_counted_by_value_has_no_bar_of_its_own():
    bars = shorten(laid(["a", OTHER, "b"], [1, 90, 9], [2, 98, 0]))
    assert (bars.names, bars.places) == (["a", "b"], [0, 2])
    assert bars.rest == pytest.approx((0.9, 0.98))
    assert bars.has_rest


def test_of_many_values_the_most_frequent_are_shown_and_the_rest_is_told():
    names = [f"value {'long ' * 3}{n}" for n in range(30)]
    before = [float(n) for n in range(30)]
    bars = shorten(laid(names, before, before))
    assert bars.places == list(range(29, 19, -1))
    assert all(len(name) <= 14 for name in bars.names)
    assert sum(bars.before) + bars.rest[0] == pytest.approx(1)
    # Bins that rise stay in their order.
    assert shorten(laid(names, before, before, ordered=True)).places == list(range(20, 30))
