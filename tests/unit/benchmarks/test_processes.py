"""What /proc is read for."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from typing import Iterator

import pytest

from benchmarks import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FAMILY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
MEGABYTE = 1_000_000


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process with one child; both end when the input is closed."""
    started = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()  # The grandchild runs.
    yield started
    started.communicate(b"\n", timeout=20)


def test_descendants_include_grandchildren_and_not_oneself(parent: subprocess.Popen[bytes]) -> None:
    (grandchild,) = processes.descendants(parent.pid)

    assert {parent.pid, grandchild} <= set(processes.descendants(os.getpid()))
    assert os.getpid() not in processes.descendants(os.getpid())


def test_a_running_process_has_name_memory_and_start(parent: subprocess.Popen[bytes]) -> None:
    assert processes.is_running(parent.pid)
    assert parent.pid in processes.named(processes.name(parent.pid))
    assert processes.start_ticks(parent.pid) is not None
    assert MEGABYTE < processes.pss_bytes(parent.pid) < 100 * MEGABYTE


def test_a_process_that_ended_has_none_of_it() -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(20)

    assert not processes.is_running(ended.pid)
    assert processes.name(ended.pid) == ""
    assert processes.start_ticks(ended.pid) is None
    assert processes.pss_bytes(ended.pid) == 0
    assert processes.own_pss_bytes(ended.pid) == 0
    assert processes.cpu_seconds(ended.pid) == 0
    assert processes.fine_cpu_seconds(ended.pid) == 0
    assert processes.descendants(ended.pid) == []


def test_processor_time_grows_with_work() -> None:
    coarse, fine = processes.cpu_seconds(os.getpid()), processes.fine_cpu_seconds(os.getpid())
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass

    assert processes.cpu_seconds(os.getpid()) - coarse >= 0.05
    assert processes.fine_cpu_seconds(os.getpid()) - fine >= 0.09


def test_the_peak_is_seen_though_the_memory_was_given_back() -> None:
    before = processes.pss_bytes(os.getpid())
    with processes.PeakMemory([os.getpid()]) as peak:
        block = bytearray(os.urandom(1)) * (60 * MEGABYTE)
        time.sleep(0.5)  # The watcher looks ten times a second.
        del block

    assert peak.peak_bytes > before + 40 * MEGABYTE
    assert peak.resident_bytes - peak.shared_bytes > 40 * MEGABYTE


def test_shared_memory_that_nobody_maps_is_resident_and_no_processes_memory() -> None:
    with processes.PeakMemory([os.getpid()]) as peak, tempfile.TemporaryFile(dir=processes.SHARED_MEMORY) as file:
        file.write(bytes(60 * MEGABYTE))
        file.flush()
        time.sleep(0.5)

    assert peak.shared_bytes > 40 * MEGABYTE
    assert peak.resident_bytes > 40 * MEGABYTE


def test_shared_memory_that_is_mapped_counts_once() -> None:
    before = processes.own_pss_bytes(os.getpid()), processes.pss_bytes(os.getpid())
    with tempfile.TemporaryFile(dir=processes.SHARED_MEMORY) as file:
        file.truncate(60 * MEGABYTE)
        with mmap.mmap(file.fileno(), 60 * MEGABYTE) as mapped:
            mapped[:] = bytes(60 * MEGABYTE)
            own, whole = processes.own_pss_bytes(os.getpid()), processes.pss_bytes(os.getpid())

    assert whole - before[1] > 50 * MEGABYTE
    assert own - before[0] < 10 * MEGABYTE
