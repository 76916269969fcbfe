"""The status page: its numbers over time, and how a browser shows them."""

from __future__ import annotations

import asyncio
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from pyruntime.telemetry import history, site
from pyruntime.telemetry.history import History
from tests.fake_compute import collect, embed, generate
from tests.telemetry.help import Page, page_site
from tests.telemetry.test_metrics import NUM_CALLS, make_calls
from tests.telemetry.test_stats import Site as EngineSite
from tests.tools import need

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><b>&amp;"
BROWSER = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=6000"
).split()


class Texts(HTMLParser):
    """Text by element id, and the words of each model's card."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._silent -= tag in ("script", "style")

    def handle_data(self, data):
        if not self._silent and data.strip():
            self.words.append(data.strip())


async def shown(page: Page, profile: Path) -> tuple[Texts, str]:
    """What a browser makes of the page, and what it logs."""
    chromium = need("chromium", "apt-get install chromium")
    command = [chromium, *BROWSER, f"--user-data-dir={profile}", "--dump-dom", f"http://{page.address}/"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    texts = Texts()
    texts.feed(done.stdout)
    return texts, done.stderr


def behind(words: list[str], label: str, count: int = 1) -> list[str]:
    """The words that follow a label."""
    place = words.index(label) + 1
    return words[place : place + count]


async def test_a_browser_shows_live_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "INTERVAL_S", 0.05)
    async with page_site() as (stack, page):
        stack.decoder.info = replace(stack.decoder.info, quantization="int8")
        stack.registry.declare(HOSTILE, "x", is_late=True)
        stack.registry.set_failed(HOSTILE, f"weights of {HOSTILE} are torn")
        await make_calls(stack)
        await page.metrics_after(NUM_CALLS)
        texts, log = await shown(page, tmp_path)
    words = texts.words
    assert behind(words, "Calls") == ["13"]
    assert behind(words, "Running calls") == ["0"]
    assert behind(words, "Errors") == ["38 %"]  # 5 of 13
    assert "serving" in words
    assert any("int8 and float32" in each for each in words)
    # The task, running, waiting, tokens a second now, tokens, requests.
    rows = [
        ["generate", "0", "0", "0", "55", "5"],
        ["embed", "0", "0", "0", "13", "2"],
        ["score", "0", "0", "0", "9", "1"],
    ]
    assert behind(words, "requests", 18) == [word for row in rows for word in row]
    for title in ("Tokens a second", "Time to first token", "Between tokens", "Embed latency", "Key/value cache"):
        assert title in words
    assert behind(words, "EmbedService/Embed", 4) == ["0", "2", "INVALID_ARGUMENT 2", "NOT_FOUND 1"]
    # The last one of each kind, how many there were, the method, the code, and a reason where there is one.
    failures = behind(words, "code and reason", 10)
    assert failures[1:4] == ["1", "methods that are not here", "UNIMPLEMENTED"]
    assert failures[5:9] == ["1", "EmbedService/Embed", "INVALID_ARGUMENT", "MALFORMED_MESSAGE"]
    assert texts.tags.count("path") > 5
    # A model's name is text, whatever it looks like.
    assert HOSTILE in words
    assert f"weights of {HOSTILE} are torn" in words
    assert "img" not in texts.tags
    assert not re.search("CONSOLE|Refused|Content Security Policy", log), log


async def test_the_page_loads_nothing_and_runs_nothing_else():
    async with page_site() as (_, page):
        status, headers, body = await page.get("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= {*policy}
    assert "unsafe" not in headers["content-security-policy"]
    html = body.decode()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", html)
    assert "innerHTML" not in html
    assert "/*style*/" not in html
    assert "/*script*/" not in html


class Models:
    """A registry of whatever is put into it."""

    def __init__(self, **engines):
        self.engines = engines

    def serving(self):
        from types import SimpleNamespace

        return [
            SimpleNamespace(info=SimpleNamespace(name=name), engine=engine) for name, engine in self.engines.items()
        ]


async def test_curves_tell_what_happened_in_each_interval():
    made = EngineSite()
    past = History(Models(m=made.engine))
    past.sample(1000.0)
    assert past.curves("m") == {}
    await collect(made.engine.generate(generate(list(range(10)), 6)))
    past.sample(1002.0)
    await made.engine.embed(embed([1, 2, 3, 4]))
    past.sample(1004.0)
    curves = past.curves("m")
    assert curves["at"] == [1002, 1004]
    assert curves["generate_tokens"] == [7.5, 0]
    assert curves["embed_tokens"] == [0, 2]
    assert curves["drawn"] == [3, 0]
    assert curves["first_token_p50"][0] > 0
    assert curves["first_token_p50"][1] is None
    assert curves["embed_p95"][0] is None
    assert curves["embed_p95"][1] > 0
    assert curves["kv_used"] == [0, 0]
    made.engine.close()


def test_curves_are_bounded_and_go_with_their_model():
    first, second = EngineSite(), EngineSite()
    models = Models(m=first.engine)
    past = History(models)
    for second_of_day in range(3 * history.MOST_POINTS):
        past.sample(float(second_of_day))
    assert len(past.curves("m")["at"]) == history.MOST_POINTS
    past.sample(0.0)  # the clock was set back: nothing breaks, and it goes on from there
    past.sample(1.0)
    assert past.curves("m")["at"][-1] == 1.0
    models.engines["m"] = second.engine  # loaded anew
    past.sample(2.0)
    assert past.curves("m") == {}
    del models.engines["m"]
    past.sample(3.0)
    assert past.curves("m") == {}
    first.engine.close()
    second.engine.close()
