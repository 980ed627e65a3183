from __future__ import annotations

import io

from rich.console import Console

from jobs.inspection.listing import Listing, list_summary, print_listings, printable, render_plain

TABLE = Listing("title", ("name", "rows"), (("a", "1,000"), ("long name", "7")),
                frozenset({"rows"}))  # fmt: skip


def _print(listing: Listing, terminal: bool) -> str:
    out = io.StringIO()
    print_listings([listing], Console(file=out, force_terminal=terminal, width=100))
    return out.getvalue()


def test_plain_text_is_aligned():
    assert render_plain(TABLE).splitlines() == [
        "title",
        "  name        rows",
        "  a          1,000",
        "  long name      7",
        "",
    ]


def test_colours_only_on_a_terminal():
    assert "\x1b[" in _print(TABLE, terminal=True)
    assert "\x1b[" not in _print(TABLE, terminal=False)


def test_long_values_are_not_cut_in_plain_text():
    path = "/a/very/long/path/" + "x" * 300
    assert path in _print(Listing("t", ("", ""), (("path", path),)), terminal=False)


def test_data_can_neither_steer_the_terminal_nor_use_rich_markup():
    evil = Listing("t", ("a",), (("\x1b[31mred\x07", ), ("[bold]x[/bold]",)))  # fmt: skip
    for terminal in (True, False):
        text = _print(evil, terminal)
        assert "\x1b[31m" not in text
        assert "\\x1b[31mred" in text
        assert "[bold]x[/bold]" in text
    assert printable("Amélie ★") == "Amélie ★"


def test_metrics_are_listed_in_the_order_of_their_cut_offs():
    metrics = {f"hit_rate@{k}": 0.1 for k in (1, 10, 5)}
    protocols = [{"name": "full_all", "systems": {"model": metrics, "random": {}}}]
    summary = {"kind": "run", "path": "p", "card": {},
               "metrics": {"headline": "full_all", "protocols": protocols}}  # fmt: skip
    listing = list_summary(summary)[-1]
    assert listing.title == "full_all (headline)"
    assert [row[0] for row in listing.rows] == ["HR@1", "HR@5", "HR@10"]
    assert listing.rows[0][2] == "\u2013"


def test_problems_are_listed():
    problem = {"file": "train/x", "what": "is missing"}
    verification = {"ok": False, "files": 1, "rows": 0, "bytes": 0, "problems": [problem]}
    summary = {"kind": "run", "path": "p", "card": {}, "metrics": None,
               "verification": verification}  # fmt: skip
    assert list_summary(summary)[-1].rows == (("train/x", "is missing"),)
