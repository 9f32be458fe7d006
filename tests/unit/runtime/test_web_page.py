"""The coordinator's page, without a browser: what it says in each state, and what becomes of names that mean harm."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any, Dict, List, Optional, Tuple

import pytest

from gpumesh.runtime import web_page
from gpumesh.scheduler.snapshot import WORKER_STATES

HOSTILE = "</td><script>alert('1')</script><img src=//x.example onerror=\"alert(2)\"> &lt;"


class Shown(HTMLParser):
    """What a browser makes of it: elements with their attributes, and the text outside of the style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: List[Tuple[str, Dict[str, Optional[str]]]] = []
        self.text = ""
        self.style = ""
        self.feed(page)
        self.close()

    @property
    def tags(self) -> List[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "style" and not self.style:
            self.style = data
        else:
            self.text += data


def worker(**fields: Any) -> Dict[str, Any]:
    row = {
        "hostname": "attic",
        "id": "w1",
        "device": "cpu",
        "device_name": "AMD EPYC",
        "devices": [{"name": "AMD EPYC", "problem": ""}],
        "score": 1.0,
        "slots": 2,
        "running": 0,
        "queued": 0,
        "done": 0,
        "alive": True,
        "draining": False,
        "problem": "",
        "lost": "",
    }
    return {**row, **fields}


def figures(*workers: Dict[str, Any], **fields: Any) -> Dict[str, Any]:
    return {
        "mesh": "d000ecf886cb57e5",
        "version": "0.1.0",
        "uptime": 7300.0,
        "workers": list(workers),
        "worker_states": dict.fromkeys(WORKER_STATES, 0),
        "task_states": {"queued": 0, "running": 0},
        "ended": 1,
        "clients": 1,
        **fields,
    }


def test_a_stranger_gets_no_figures_and_a_way_in() -> None:
    shown = Shown(web_page.render(None))

    assert "table" not in shown.tags
    assert ("a", {"href": "/?login"}) in shown.elements
    assert "gpumesh join" in shown.text


def test_an_empty_mesh_says_how_a_machine_is_lent() -> None:
    shown = Shown(web_page.render(figures()))

    assert "table" not in shown.tags
    assert "No worker is here yet" in shown.text
    assert "1 task ended, 1 client, up 2 h" in shown.text


def test_workers_and_what_they_do() -> None:
    cards = [{"name": "H200", "problem": ""}] * 3 + [{"name": "H200", "problem": "broken"}]
    rows = (
        worker(device_name="H200", devices=cards, score=2345.6, running=2, done=12),
        worker(hostname="cellar", device_name="", devices=[], alive=False, lost="the connection was lost"),
        worker(problem="paused by its owner"),
    )
    states = {"ready": 1, "away": 1, "paused": 1, "leaving": 0}

    page = web_page.render(figures(*rows, worker_states=states, task_states={"queued": 11, "running": 2}))

    shown = Shown(page)
    assert "1 worker ready, 1 worker away, 1 worker paused, 11 tasks queued, 2 tasks running, 1 task ended" in shown.text
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", page)[1:]]
    assert [[Shown(cell).text for cell in row] for row in cells] == [
        ["attic w1", "3 x H200", "2346", "2", "2", "0", "12", "ready"],
        ["cellar w1", "cpu", "1", "2", "0", "0", "0", "away: the connection was lost"],
        ["attic w1", "AMD EPYC", "1", "2", "0", "0", "0", "paused: paused by its owner"],
    ]
    assert [fields.get("class") for tag, fields in shown.elements if tag == "tr"] == [None, None, "away", None]


@pytest.mark.parametrize("state", ["ready", "paused", "away"])
def test_what_strangers_are_called_stays_text(state: str) -> None:
    words = {
        "hostname": HOSTILE,
        "id": HOSTILE,
        "device_name": HOSTILE,
        "problem": HOSTILE if state == "paused" else "",
        "lost": HOSTILE if state == "away" else "",
    }

    tame = Shown(web_page.render(figures(worker(problem="x" if state == "paused" else "", alive=state != "away", lost="x"))))
    shown = Shown(web_page.render(figures(worker(alive=state != "away", **words), mesh=HOSTILE, version=HOSTILE)))

    assert shown.elements == tame.elements
    assert shown.text.count(HOSTILE) == (5 if state == "ready" else 6)


@pytest.mark.parametrize("told", [None, figures(), figures(worker())])
def test_nothing_is_loaded_and_the_policy_lets_only_this_style_through(told: Optional[Dict[str, Any]]) -> None:
    page = web_page.render(told)
    shown = Shown(page)

    digest = base64.b64encode(hashlib.sha256(shown.style.encode()).digest()).decode()
    assert web_page.POLICY.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert not {"script", "img", "link", "iframe", "form", "object"} & set(shown.tags)
    assert not any(name == "style" or name.startswith("on") for _, fields in shown.elements for name in fields)
    assert "//" not in page
    assert "url(" not in page
    assert "@import" not in page
