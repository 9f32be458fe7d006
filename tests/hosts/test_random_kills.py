"""`kill -9` at random, of any process of two workers on hosts of their own: every task arrives, and the workers are whole again."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, List

import pytest

from gpumesh import accelerate
from tests.support import tasks
from tests.support.hosts import Hosts, kill_one_of
from tests.support.processes import until
from tests.support.site_of_hosts import site_of_hosts

TASKS = 80
KILLS = 6


@pytest.mark.parametrize("seed", [1])
def test_every_task_arrives_once(hosts: Hosts, tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    with site_of_hosts(tmp_path, hosts) as site:
        site.join_all(slots=2, w0=hosts.two, w1=hosts.two)
        with site.client(hosts.one) as mesh:
            for number in range(2):
                site.ident(mesh, f"w{number}")
            delivered: List[Any] = []
            count = accelerate(mesh, retries=KILLS)(tasks.count_then_sleep)
            futures = [count.remote(str(site.marks), f"t{number}", 0.1) for number in range(TASKS)]
            for future in futures:
                future.add_done_callback(lambda one: delivered.append(one.result()))
            until(lambda: list(site.marks.iterdir()), 20, what="the first has started")

            joined = 2
            for _ in range(KILLS):
                time.sleep(choice.uniform(0.0, 0.4))
                place = choice.choice(sorted(site.workers))
                victim, _ = kill_one_of(site.workers[place], choice)
                if victim == site.workers[place].process.pid:
                    site.workers.pop(place).process.wait(20)
                    site.join(f"w{joined}", hosts.two, slots=2)  # The agent itself: somebody starts another.
                    joined += 1

            assert [future.result(50) for future in futures] == [f"t{number}" for number in range(TASKS)]
            assert sorted(delivered) == sorted(f"t{number}" for number in range(TASKS))
            started = {mark.name.split(".")[0] for mark in site.marks.iterdir()}
            assert started == set(delivered)
            until(lambda: len([view for view in mesh.workers() if view["alive"] and not view["problem"]]) == 2, 20)
        assert site.tracebacks() == []
