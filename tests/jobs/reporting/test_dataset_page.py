from __future__ import annotations

import numpy as np
import pytest

from etl.quality.drift import OTHER, Overlay
from jobs.inspection.inspect_dataset import app
from jobs.reporting.dataset_page import render_dataset, shorten
from jobs.support.run_app import run_app
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run
from tests.jobs.reporting.pages import Page

CONTRACT = (
    {"rule": "null_rate users.zip", "severity": "error", "passed": True, "received": "0 null",
     "allowed": "at most 5%"},
    {"rule": "range logs.price", "severity": "warn", "passed": False,
     "received": "<script>7</script>", "allowed": "to 5"},
)  # fmt: skip


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """A version with a contract, and the card of a run on it."""
    root = tmp_path_factory.mktemp("page")
    config = FakeConfig(users=60, items=12, seed=11, contract=CONTRACT)
    path = write_dataset(root, config)
    write_run(root / "runs", path, config)
    return path


@pytest.fixture(scope="module")
def html(version):
    return render_dataset(version)


def test_the_page_is_well_formed_and_offline(html):
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert "1 of 2 rules of its contract are violated." in " ".join(page.text)
    sources = page.values("src") + [h for h in page.values("href") if not h.startswith("#")]
    assert sources == ["data:,"]


def test_what_the_data_says_is_escaped(html):
    assert "<script>" not in html
    assert "&lt;script&gt;7" in html


def test_tokens_stand_for_ids(html):
    text = Page(html).text
    assert "Label rate by rating." in text
    assert "Most frequent values of movie_id." in text
    assert any("Item" in part or part.isdigit() for part in text)


def test_without_a_contract_the_page_says_so_and_is_reproducible(tmp_path):
    version = write_dataset(tmp_path, FakeConfig(users=60, items=12))
    html = render_dataset(version)
    assert html == render_dataset(version)
    assert "It has no contract." in html


def test_the_command_writes_one_file_and_is_for_datasets(version, tmp_path, capsys):
    file = tmp_path / "page.html"
    assert run_app(app, [str(version), "--html", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert file.read_text().startswith("<!doctype html>")
    runs = version.parents[2] / "runs" / "demo"
    assert run_app(app, [str(runs), "--html", str(file)]) == 2


def laid(names: list[str], counts: list[float], ordered: bool = False) -> Overlay:
    return Overlay(tuple(names), np.array(counts), np.array(counts), ordered)


def test_few_values_are_all_shown():
    bars = shorten(laid(["a", "b"], [3, 1]))
    assert (bars.names, bars.shares) == (["a", "b"], [0.75, 0.25])
    assert not bars.has_rest


def test_what_was_not_counted_by_value_has_no_bar_of_its_own():
    bars = shorten(laid(["a", OTHER, "b"], [1, 90, 9]))
    assert (bars.names, bars.shares) == (["a", "b"], [0.01, 0.09])
    assert bars.rest == pytest.approx(0.9)
    assert bars.has_rest


def test_of_many_values_the_most_frequent_are_shown_and_the_rest_is_told():
    names = [f"{n} value {'long ' * 3}" for n in range(30)]
    counts = [float(n) for n in range(30)]
    bars = shorten(laid(names, counts))
    assert [int(name.split()[0]) for name in bars.names] == list(range(29, 19, -1))
    assert all(len(name) <= 14 for name in bars.names)
    assert sum(bars.shares) + bars.rest == pytest.approx(1)
    # Bins that rise stay in their order.
    rising = shorten(laid(names, counts, ordered=True))
    assert [int(name.split()[0]) for name in rising.names] == list(range(20, 30))
