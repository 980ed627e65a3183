from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

import jobs.reporting.plots
from conf.artefacts.run import METRICS_FILE, RUN_CARD_FILE, write_json
from jobs.reporting.page import RUN_SECTIONS, render_page, render_sweep, run_title, write_sweep_page
from jobs.reporting.run_data import RunData, read_run
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run
from tests.jobs.reporting.pages import Page
from training.trials import Study, Trial


@pytest.fixture(scope="module")
def html(finished):
    return render_page(finished)


def test_the_page_is_well_formed_and_ids_are_unique(html):
    ids = Page(html).values("id")
    assert len(ids) == len(set(ids)) > 20


def test_every_section_is_there_and_linked(html):
    page = Page(html)
    anchors = [href[1:] for href in page.values("href") if href.startswith("#")]
    sections = [a["id"] for tag, a in page.seen if tag == "section"]
    assert len(sections) == len(RUN_SECTIONS)
    assert set(sections) <= set(anchors)


def test_nothing_is_fetched_and_nothing_runs(html):
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.seen}
    assert not any(name.startswith("on") for _, attrs in page.seen for name in attrs)
    assert page.values("src") == []
    assert all(href.startswith(("#", "data:")) for href in page.values("href"))
    assert not re.search(r"url\((?!#)|@import", html)
    policy = next(a for tag, a in page.seen if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")


def test_the_same_run_gives_the_same_page(finished, html):
    assert render_page(finished) == html


def test_drawings_have_labels_and_tables_have_captions(html):
    page = Page(html)
    drawings = [attrs for tag, attrs in page.seen if tag == "svg"]
    assert len(drawings) > 4
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in drawings)
    tags = [tag for tag, _ in page.seen]
    assert tags.count("caption") == tags.count("table") > 5


def test_both_colour_schemes_know_every_variable(html):
    light, dark = html.split("prefers-color-scheme: dark", 1)
    used = set(re.findall(r"var\(--([a-z-]+)\)", html)) - {"length", "tone"}
    assert used <= set(re.findall(r"--([a-z-]+):", light))
    dark_block = dark[: dark.index("* { box-sizing")]
    assert used <= set(re.findall(r"--([a-z-]+):", dark_block))


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2, contrast ratio of two `#rrggbb` colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_in_both_schemes(html):
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for block in (light, dark[: dark.index("* { box-sizing")]):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for text in ("ink", "muted", "model"):
            for ground in ("surface", "page"):
                assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert _contrast(colours["warn"], colours["warn-soft"]) >= 4.5


EVIL = "<script>alert('x')</script>"


def test_names_from_users_and_data_are_only_text(tmp_path):
    config = FakeConfig(reason=EVIL, title=f"{EVIL}&$x$", users=30, items=12)
    run = write_run(tmp_path / "runs", write_dataset(tmp_path / "datasets", config), config)
    card = {**read_run(run).card}
    card["config"] = {**card["config"], "name": EVIL, "model": {"name": EVIL}}
    card["versions"] = {EVIL: EVIL}
    card["status"] = EVIL
    write_json(run / RUN_CARD_FILE, card)
    data = read_run(run)
    metrics = {**data.metrics, "split": EVIL, "headline": EVIL}
    protocol = data.metrics["protocols"][0]
    systems = {**protocol["systems"], EVIL: {f"{EVIL}@5": 0.5, "mrr": 0.1}}
    metrics["protocols"] = [{**protocol, "name": EVIL, "systems": systems}]
    write_json(run / METRICS_FILE, metrics)
    page = Page(render_page(read_run(run)))
    assert "script" not in {tag for tag, _ in page.seen}
    assert "".join(page.text).count("<script>") >= 6


def test_a_run_that_has_only_just_begun_has_a_report(tmp_path):
    data = RunData(
        tmp_path / "begun", {"status": "training"},
        gaps={"metrics": "not yet", "dataset": "no dataset", "lists": "not yet"},
    )  # fmt: skip
    page = Page(render_page(data))
    text = " ".join(page.text)
    assert text.count("no dataset") >= 4
    assert "The run's status is 'training'." in text
    assert run_title(data) == "begun"


def test_a_failed_run_says_why(finished):
    card = {**finished.card, "status": "failed", "error": "training diverged in epoch 3"}
    assert "training diverged in epoch 3" in render_page(replace(finished, card=card))
    assert 'class="note missing problem"' not in render_page(finished)


def test_a_report_without_any_gap_text_still_renders(finished):
    bare = replace(finished, manifest=None, version=None, catalogue=None, metrics=None, lists=())
    data = replace(bare, gaps={"metrics": "m", "dataset": "d"}, epochs=())
    Page(render_page(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": ({"epoch": "one", "loss": [], "validation": {"ndcg@10": {}}},)},
        {"metrics": {"protocols": [{"name": "a", "systems": {"model": {"ndcg@10": "high"}}}]}},
        {"metrics": {"protocols": "none", "headline": 3}},
        {"metrics": {"protocols": [1], "rows": "many", "beyond_accuracy": 5, "labels": "x"}},
    ],
)
def test_wrong_types_inside_readable_json_become_a_note(finished, changes):
    page = Page(render_page(replace(finished, **changes)))
    sections = [a["id"] for tag, a in page.seen if tag == "section"]
    assert len(set(sections)) == len(RUN_SECTIONS)
    assert "Provenance" in "".join(page.text)


@pytest.fixture
def drawn_once(monkeypatch):
    """Plots are drawn once for the same arguments: drawing is nearly all that a page costs."""
    for name, plot in list(vars(jobs.reporting.plots).items()):
        if name.startswith("plot_"):
            monkeypatch.setattr(jobs.reporting.plots, name, remember(plot))


def remember(plot):
    drawings = {}

    def draw(*arguments, **options):
        key = pickle.dumps((arguments, options))
        if key not in drawings:
            drawings[key] = plot(*arguments, **options)
        return drawings[key]

    return draw


@pytest.mark.exhaustive
def test_every_value_of_the_card_may_have_the_wrong_type(finished, drawn_once):
    for key in finished.card:
        for value in (None, 3, "text", [1], {"a": [None]}):
            Page(render_page(replace(finished, card={**finished.card, key: value})))


def build_result(directory: Path, metric: str = "ndcg@10") -> Study:
    trials = []
    for number, value in enumerate((0.25, 0.5, None)):
        run = directory / "trials" / f"{number:04d}" / "runs" / "a b"
        run.mkdir(parents=True)
        (run / "report.html").write_text("a report")
        state, detail = ("complete", str(run)) if value else ("fail", "<script>diverged</script>")
        trials.append(Trial(number, state, {"a": "[64]", "b": 1e-5}, detail, 3.0, value, 1))
    return Study(directory, metric, trials)


@pytest.mark.parametrize(("metric", "order"), [("ndcg@10", ["1", "0", "2"]), ("loss", list("012"))])
def test_the_best_trial_comes_first_and_leads_to_its_report(
    metric: str, order: list[str], tmp_path: Path
) -> None:
    text = write_sweep_page(build_result(tmp_path, metric)).read_text()
    rows = text.partition("<tbody>")[2].split("<tr>")[1:]
    assert [re.search(r">(\d)<", row).group(1) for row in rows] == order
    links = re.findall(r'href="(trials/[^"]+)"', text)
    assert links == [f"trials/000{number}/runs/a%20b/report.html" for number in order[:2]]
    assert f"Trial {order[0]} is the best of 2" in " ".join(Page(text).text)


def test_what_ended_a_trial_is_told_and_escaped(tmp_path: Path) -> None:
    text = render_sweep(build_result(tmp_path))
    assert "<script>" not in text
    assert "fail: &lt;script&gt;diverged" in text


def test_a_value_that_is_a_mapping_is_shown_as_it_is(tmp_path: Path) -> None:
    trial = Trial(0, "fail", {"a": {"value": 7, "href": "x"}}, "diverged", 0.0)
    text = "".join(Page(render_sweep(Study(tmp_path, "mrr", [trial]))).text)
    assert "{'value': 7, 'href': 'x'}" in text


def test_a_report_that_is_not_there_is_not_led_to(tmp_path: Path) -> None:
    result = build_result(tmp_path)
    (result.trials[1].run / "report.html").unlink()
    assert len(re.findall(r'href="trials/', render_sweep(result))) == 1


def test_a_sweep_without_trials_says_so(tmp_path: Path) -> None:
    text = " ".join(Page(render_sweep(Study(tmp_path, "mrr"))).text)
    assert "No trial is complete." in text
    assert "No trial has begun." in text
