"""The server's page in a real browser: what a person types, and what is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.browser import run_browser, wait_for
from training.serving.app import build_app
from training.serving.server import Server
from training.serving.server_config import RecommendConfig, ServerConfig

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ATTACK = '<img src=x onerror="window.owned = 1"><b>bold</b>'
ITEMS = "return [...document.querySelectorAll('#items small')].map(e => Number(e.innerText))"


@pytest.fixture
def url(models: Path, tmp_path: Path) -> Iterator[str]:
    quoted = ATTACK.replace('"', '""')
    lines = [f'{100 + n},"{quoted if n % 2 else f"Film {n}"}"\n' for n in range(40)]
    items = tmp_path / "items.csv"
    items.write_text("movie,title\n" + "".join(lines))
    app = build_app(Server(ServerConfig(models, 60.0, recommend=RecommendConfig(items_file=items))))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        wait_for(lambda: running.started)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


def test_a_list_with_scores_and_a_history_whose_titles_stay_text(url, client, tmp_path) -> None:
    expected = client.get("/v1/recommend?user=1003&k=40").json()
    met = {row["item"] for row in expected["history"]}
    with run_browser(tmp_path) as browser:
        browser.open(url)
        browser.type("#user", "1003")
        browser.type("#k", "40")
        browser.click("button")
        wait_for(lambda: "items by " in browser.read("#status")[0])
        assert met.isdisjoint(browser.run(ITEMS))
        assert len(browser.read("#histories li")) == len(expected["history"]) > 0
        scores = list(map(float, browser.read("#items td:nth-child(n+3)")))
        each = sum("score" in name for name in expected["items"][0])
        assert len(scores) == each * len(browser.run(ITEMS)) > 0
        for place in ("#items td", "#histories li"):
            assert any(ATTACK in text for text in browser.read(place))
        assert browser.run("return document.querySelectorAll('main img, main b').length") == 0
        assert browser.run("return window.owned === undefined") is True
        browser.click("#seen")
        browser.click("button")
        wait_for(lambda: not met.isdisjoint(browser.run(ITEMS)))
        assert [line for line in browser.list_errors() if "favicon" not in line] == []
