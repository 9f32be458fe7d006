"""The status page in a browser: Chromium of the system, driven by playwright; the workers are peers of a real coordinator."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.protocol.messages import RegisterWorker
from tests.integration.test_http import TOKEN, Site
from tests.support.peers import handshake
from tests.support.processes import until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)
HOSTILE = "<script>document.title='mine'</script><img src=//x.example onerror=alert(1)>"

# Of every text that is shown: how far its colour is from that of what is behind it (WCAG 2.1, 1 to 21).
CONTRASTS = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const found = channels(getComputedStyle(element).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const shown = [...document.body.querySelectorAll('*')].filter(each => each.innerText && each.children.length === 0);
  return shown.map(each => {
    const pair = [light(channels(getComputedStyle(each).color)), light(behind(each))].sort((a, b) => b - a);
    return [(pair[0] + 0.05) / (pair[1] + 0.05), each.innerText];
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield launched
        launched.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def visit(browser: Any, site: Site, *, token: str = TOKEN, width: int = 1000, scheme: str = "light") -> Iterator[Any]:
    """The page as a stranger sees it; the password is there for when it is asked for. Nothing may be amiss when it is closed."""
    context = browser.new_context(
        viewport={"width": width, "height": 700}, color_scheme=scheme, http_credentials={"username": "me", "password": token}
    )
    page = context.new_page()
    amiss: List[str] = []
    own = f"http://127.0.0.1:{site.port}/"
    page.on("console", lambda message: amiss.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: amiss.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (amiss.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(own) else amiss.append(f"asks for {request.url}"))
    try:
        page.goto(own)
        yield page
        assert amiss == []
    finally:
        context.close()


@contextlib.contextmanager
def worker(site: Site, ident: str, hostname: str, *devices: DeviceFacts) -> Iterator[None]:
    sock, connection = handshake(site.port, TOKEN, role="worker")
    with sock:
        connection.send(RegisterWorker(ident, WorkerFacts(hostname=hostname, slots=2, cores=2, devices=devices), ()))
        sock.sendall(b"".join(bytes(part) for part in connection.data_to_send()))
        until(lambda: any(row["id"] == ident for row in rows(site)), what=f"{ident} has joined")
        yield


def rows(site: Site) -> Any:
    async def figures() -> Any:
        return site.coordinator.figures()["workers"]

    return site.thread.call(figures, timeout=5.0)


def is_narrow_enough(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def unreadable(page: Any) -> List[Any]:
    found = page.evaluate(CONTRASTS)
    assert found
    return [each for each in found if each[0] < 4.5]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_stranger_is_told_what_this_is_and_comes_in_with_the_token(browser: Any, site: Site, scheme: str) -> None:
    with visit(browser, site, width=360, scheme=scheme) as page:
        assert "A gpumesh coordinator answers here" in page.inner_text("body")
        assert page.query_selector("table") is None
        assert unreadable(page) == []
        assert is_narrow_enough(page)

        page.click("a")

        assert "No worker is here yet" in page.inner_text("body")
        assert unreadable(page) == []
        assert is_narrow_enough(page)


@pytest.mark.parametrize("width", [360, 1000])
def test_machines_at_work_one_away_and_one_that_means_harm(browser: Any, site: Site, width: int) -> None:
    cards = [DeviceFacts("cuda", index, f"H200 {HOSTILE}", 1 << 37, 2345.0) for index in range(2)]
    mesh = GPUMesh(f"http://127.0.0.1:{site.port}", token=TOKEN, fallback=False)
    with mesh, contextlib.ExitStack() as stays:
        stays.enter_context(worker(site, "w1", HOSTILE, *cards))
        with worker(site, "w2", "a-machine-with-quite-a-long-name.of-some-department.example.org"):
            pass
        future = accelerate(mesh)(abs).remote(-1)
        until(lambda: any(row["running"] + row["queued"] for row in rows(site)), what="a task is at a worker")
        until(lambda: any(not row["alive"] for row in rows(site)), what="one is away")
        for scheme in ("light", "dark"):
            with visit(browser, site, width=width, scheme=scheme) as page:
                page.click("a")
                cells = page.eval_on_selector_all("tbody td", "cells => cells.map(each => each.innerText.replace(/\\n/g, ' '))")

                assert page.title() == "gpumesh"
                assert len(cells) == 16
                assert cells[:4] == [f"{HOSTILE} w1", f"2 x H200 {HOSTILE}", "2345", "2"]
                assert cells[8].startswith("a-machine-with-quite-a-long-name")
                assert cells[15].startswith("away: ")
                assert "1 worker ready, 1 worker away, 1 task" in page.inner_text("body")
                assert unreadable(page) == []
                assert is_narrow_enough(page)
                assert page.is_visible("thead") is (width > 360)
        future.cancel()


def test_a_wrong_token_opens_nothing(browser: Any, site: Site) -> None:
    with pytest.raises(AssertionError, match="401"), visit(browser, site, token="a wrong one of some length") as page:
        page.click("a")
        assert "this token is not the mesh's" in page.inner_text("body")
        assert page.query_selector("table") is None
