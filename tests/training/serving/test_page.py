"""The server's page in a real browser: what a person types, and what is shown."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.training.train import TrainConfig
from tests.browser import Browser, run_browser, wait_for
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.models.registry import build_model
from training.serving.app import build_app
from training.serving.models.server_config import RecommendConfig, ServerConfig
from training.serving.requests.limits import ServerLimits
from training.serving.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ATTACK = '<img src=x onerror="window.owned = 1"><b>bold</b>'
USER, SECONDS = "1003", 5.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with run_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@contextmanager
def serve(models: Path, items: Path | None = None) -> Iterator[str]:
    """A server of this process; yields its URL."""
    config = ServerConfig(
        models, 60.0, ServerLimits(seconds=SECONDS), RecommendConfig(items_file=items)
    )
    app = build_app(Server(config))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        wait_for(lambda: running.started)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    quoted = ATTACK.replace('"', '""')
    lines = [f'{100 + n},"{quoted if n % 2 else f"Film {n}"}"\n' for n in range(40)]
    items = tmp_path_factory.mktemp("items") / "items.csv"
    items.write_text("movie,title\n" + "".join(lines))
    with serve(models, items) as running:
        yield running


def ask(browser: Browser, url: str, user: str, k: int = 10) -> str:
    """Types a user, presses the button and returns the status that comes."""
    browser.open(url)
    before = browser.read("#status")
    assert browser.run("return document.querySelector('main').hidden") is True
    browser.type("#user", user)
    browser.type("#k", str(k))
    browser.click("button")
    (status,) = wait_for(lambda: (found := browser.read("#status")) != before and found)
    return str(status)


def recommend(url: str, query: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/recommend?{query}", timeout=60) as answer:
        return dict(json.load(answer))


def list_complaints(browser: Browser) -> list[str]:
    """Errors of the page's scripts; the server has no icon."""
    return [line for line in browser.list_errors() if "favicon" not in line]


def test_a_user_gets_a_list_with_scores_and_a_history(browser: Browser, url: str) -> None:
    status = ask(browser, url, USER, k=6)
    expected = recommend(url, f"user={USER}&k=6")
    assert status.startswith("6 items by ")
    assert "towers, version 1" in status
    assert "do not know" not in status
    assert browser.run("return document.querySelector('main').hidden") is False
    items = expected["items"]
    assert len(browser.read("#items th")) == 2 + sum("score" in name for name in items[0])
    places = [f"{place + 1}" for place in range(6)]
    assert browser.read("#items tr td:first-child") == places
    names = [f"{item['title']} {item['item']}" for item in items]
    assert browser.read("#items tr td:nth-child(2)") == names
    scores = [[f"{value:.4f}" for name, value in item.items() if "score" in name] for item in items]
    shown = browser.read("#items td:nth-child(n+3)")
    assert shown == [score for row in scores for score in row]
    history = [f"{row['title']} {row['item']}" for row in expected["history"]]
    assert history
    assert browser.read("#histories li") == history
    assert list_complaints(browser) == []


def test_a_title_that_is_markup_stays_text(browser: Browser, url: str) -> None:
    ask(browser, url, USER, k=20)
    assert any(ATTACK in text for text in browser.read("#items td"))
    assert any(ATTACK in text for text in browser.read("#histories li"))
    assert browser.run("return document.querySelectorAll('main img, main b').length") == 0
    assert browser.run("return window.owned === undefined") is True


def test_items_met_before_come_where_they_are_asked_for(browser: Browser, url: str) -> None:
    met = {row["item"] for row in recommend(url, f"user={USER}")["history"]}
    ask(browser, url, USER, k=40)
    read = "return [...document.querySelectorAll('#items small')].map(e => Number(e.innerText))"
    assert met.isdisjoint(browser.run(read))
    browser.click("#seen")
    browser.click("button")
    wait_for(lambda: not met.isdisjoint(browser.run(read)))


def test_the_page_asks_for_what_the_ranking_model_reads_of_a_request(
    browser: Browser, tmp_path: Path
) -> None:
    version = write_tiny_dataset(tmp_path / "data", config=TinyConfig(users=12, context=True))
    model = {"kind": "ranking", "network": "fm", "embedding_dim": 4, "embedding_stddev": 0.3}
    config = TrainConfig.model_validate({"dataset": "d", "name": "scores", "model": model})
    manifest = read_manifest(version)
    built = build_model(config.model, manifest, 3)
    run = TrainedModel(tmp_path / "run", built, config, manifest, version)
    write_export(run, ExportOptions(tmp_path / "models"))
    with serve(tmp_path / "models") as url:
        shown = []
        for device in ("", "app", "web"):
            browser.open(f"{url}/?user={USER}&device={device}")
            wait_for(lambda: "items by" in browser.read("#status")[0])
            assert browser.read("#context label") == ["device"]
            shown.append(browser.read("#items td"))
        assert len({tuple(one) for one in shown}) == 3
        browser.run("document.querySelector('#context input').value = 'app'")
        browser.click("button")
        wait_for(lambda: browser.read("#items td") == shown[1])
        assert list_complaints(browser) == []


def test_what_the_server_refuses_and_its_silence_are_shown(browser: Browser, models: Path) -> None:
    with serve(models) as url:
        # The field's own bound is not the only one.
        browser.open(url)
        browser.run("document.getElementById('k').removeAttribute('max')")
        browser.type("#user", USER)
        browser.type("#k", "5000")
        browser.click("button")
        wait_for(lambda: browser.run("return document.getElementById('status').className"))
        (said,) = browser.read("#status")
        assert "1000" in said
        assert browser.run("return document.querySelector('main').hidden") is True
        browser.type("#k", "5")
        browser.click("button")  # An error does not stay.
        wait_for(lambda: "5 items by" in browser.read("#status")[0])
        assert browser.run("return document.getElementById('status').className") == ""
    browser.click("button")
    wait_for(lambda: browser.read("#status") == ["the server does not answer"])
    assert browser.run("return document.querySelector('main').hidden") is True
