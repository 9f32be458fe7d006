"""GPUMesh as an object: what it resolves, when it connects, how it ends. Against a coordinator in miniature, or none."""

from __future__ import annotations

import gc
import inspect
import logging
import pickle
import subprocess
import sys
import threading
import time
from typing import Any, Dict, Iterator, List

import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate, errors
from gpumesh.client import mesh as mesh_module
from tests.unit.client.fake_mesh import FakeMesh
from tests.unit.client.fake_session import until


def identity(value: Any) -> Any:
    return value


class StandIn:
    """An embedded mesh that is a coordinator in miniature."""

    started: List[Any] = []  # Shared on purpose: what was started.

    def __init__(self, *, workers: int = 2, slots: int = 1) -> None:
        self.fake = FakeMesh()
        self.asked_for = (workers, slots)
        self.url = self.fake.url
        self.token = "secret"
        self.is_closed = False
        StandIn.started.append(self)

    def close(self) -> None:
        self.is_closed = True
        self.fake.close()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN", "GPUMESH_LOCAL", "GPUMESH_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("gpumesh.runtime.embedded.EmbeddedMesh", StandIn)
    StandIn.started = []
    yield
    for mesh in StandIn.started:
        mesh.close()


@pytest.fixture
def fake() -> Iterator[FakeMesh]:
    with FakeMesh() as fake:
        yield fake


# --- building


def test_building_neither_connects_nor_blocks() -> None:
    started = time.monotonic()
    mesh = GPUMesh("http://192.0.2.1:8000", token="t")

    assert time.monotonic() - started < 0.5
    assert mesh.url == "http://192.0.2.1:8000"
    mesh.close()


@pytest.mark.parametrize("url", ["", "http://", "ftp://host:1", "host:99999", "http://a b"])
def test_an_address_without_meaning_is_refused_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="address|scheme|port"):
        GPUMesh(url)
    monkeypatch.setenv("GPUMESH_LOCAL", "1")
    with pytest.raises(ValueError, match="address|scheme|port"):
        GPUMesh(url)


def test_timeouts_without_meaning_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="connect_timeout=0"):
        GPUMesh("h:1", connect_timeout=0)
    with pytest.raises(ValueError, match="reconnect_timeout=-1"):
        GPUMesh("h:1", reconnect_timeout=-1)


def test_the_environment_names_the_mesh(fake: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_URL", fake.url)
    monkeypatch.setenv("GPUMESH_TOKEN", "secret")

    with GPUMesh() as mesh:
        assert mesh.url == fake.url
        assert accelerate(mesh)(identity).remote(1).result(5) == 0


def test_the_saved_connection_names_the_mesh(fake: FakeMesh) -> None:
    from gpumesh.runtime.settings import save_connection

    save_connection(fake.url, "secret")

    with GPUMesh() as mesh, GPUMesh(fake.url) as named:
        assert mesh.url == named.url == fake.url
        assert accelerate(mesh)(identity).remote(1).result(5) == 0
        assert accelerate(named)(identity).remote(1).result(5) == 0


# --- this machine instead


def test_local_starts_an_embedded_mesh_and_ends_it() -> None:
    with GPUMesh.local(workers=3, slots=2) as mesh:
        (embedded,) = StandIn.started
        assert embedded.asked_for == (3, 2)
        assert accelerate(mesh)(identity).remote(1).result(5) == 0
        assert repr(mesh) == "<GPUMesh on this machine>"

    assert embedded.is_closed


def test_without_any_mesh_tasks_run_here_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with GPUMesh() as mesh:
        assert not StandIn.started
        function = accelerate(mesh)(identity)
        assert [function.remote(1).result(5), function.remote(1).result(5)] == [0, 1]

    (embedded,) = StandIn.started
    assert embedded.asked_for[0] == 1
    assert embedded.is_closed
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_gpumesh_local_beats_every_address(
    fake: FakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUMESH_LOCAL", "1")

    with GPUMesh(fake.url, token="secret", fallback=False) as mesh:
        assert not StandIn.started
        assert accelerate(mesh)(identity).remote(1).result(5) == 0
        assert len(StandIn.started) == 1

    assert not fake.received
    assert [record.message for record in caplog.records] == ["GPUMESH_LOCAL is set; running on this machine"]
    assert StandIn.started[0].is_closed


def test_without_fallback_an_unreachable_mesh_is_an_error() -> None:
    with GPUMesh("127.0.0.1:1", token="t", fallback=False) as mesh:
        with pytest.raises(errors.MeshUnavailableError):
            accelerate(mesh)(identity).remote(1)
        with pytest.raises(errors.MeshUnavailableError):
            accelerate(mesh)(identity).map([1])
    assert not StandIn.started


def test_a_wrong_token_is_an_error_never_a_fallback(fake: FakeMesh) -> None:
    with GPUMesh(fake.url, token="wrong") as mesh, pytest.raises(errors.AuthenticationError):
        accelerate(mesh)(identity).map([1])
    assert not StandIn.started


# --- the end


def test_close_fails_what_is_pending_and_all_that_follows() -> None:
    with FakeMesh(answers=False) as fake:
        mesh = GPUMesh(fake.url, token="secret")
        function = accelerate(mesh)(identity)
        future, stream = function.remote(1), function.map([1, 2])
        mesh.close()
        mesh.close()

        with pytest.raises(errors.MeshClosedError):
            future.result(5)
        with pytest.raises(errors.MeshClosedError):
            list(stream)
        for use in (lambda: function.remote(1), lambda: function.map([1]), mesh.workers):
            with pytest.raises(errors.MeshClosedError):
                use()
        assert mesh.is_closed
        assert repr(mesh) == "<GPUMesh closed>"


def test_a_mesh_that_was_never_used_closes() -> None:
    mesh = GPUMesh()
    mesh.close()

    with pytest.raises(errors.MeshClosedError):
        accelerate(mesh)(identity).remote(1)
    assert not StandIn.started


def test_an_embedded_mesh_ends_with_its_object() -> None:
    mesh = GPUMesh.local()
    (embedded,) = StandIn.started
    del mesh
    gc.collect()

    assert until(lambda: embedded.is_closed)


def test_what_is_pending_keeps_a_dropped_mesh_going(fake: FakeMesh) -> None:
    gate = threading.Event()

    def answer(task_id: int, payload: Any) -> Any:
        from gpumesh.serialization.values import dumps

        gate.wait(5)
        return task_id, 0, dumps("late"), 0.0

    fake.on_submit = answer
    future = accelerate(GPUMesh(fake.url, token="secret"))(identity).remote(1)
    gc.collect()
    gate.set()

    assert future.result(5) == "late"


# --- asking


def test_what_the_pool_says(fake: FakeMesh) -> None:
    cpu = {"kind": "cpu", "index": 0, "name": "EPYC", "memory": 5, "score": 1.0}
    card = {"kind": "cuda", "index": 1, "name": "RTX 3080", "memory": 10, "score": 50.0, "system_index": 0, "uuid": "GPU-b"}

    def worker(ident: str, *devices: Any, **more: Any) -> Dict[str, Any]:
        return {
            "id": ident,
            "hostname": f"host-{ident}",
            "alive": True,
            "running": 0,
            "problem": "",
            "devices": devices,
            **more,
        }

    fake.on_query = lambda query: (worker("a", cpu, running=1), worker("b", cpu, card))
    with GPUMesh(fake.url, token="secret") as mesh:
        assert [worker["id"] for worker in mesh.workers()] == ["a", "b"]
        rows = mesh.devices()
        shown = ("index", "hostname", "device", "device_name", "score", "status", "memory", "worker", "system_index")
        assert [tuple(row[name] for name in shown) for row in rows] == [
            (0, "host-b", "cuda:1", "RTX 3080", 50.0, "idle", 10, "b", 0),
            (1, "host-a", "cpu", "EPYC", 1.0, "busy", 5, "a", None),
            (2, "host-b", "cpu", "EPYC", 1.0, "idle", 5, "b", None),
        ]
        assert (mesh.device_count(), mesh.total_score()) == (3, 52.0)
        fake.on_query = lambda query: (worker("b", cpu, {**card, "problem": "lost"}), worker("c", cpu, problem="paused"))
        rows = mesh.devices()
        assert [(row["worker"], row["status"], row["reason"]) for row in rows] == [
            ("b", "idle", ""),
            ("b", "unused", "lost"),
            ("c", "unused", "paused"),
        ]
        assert (mesh.device_count(), mesh.total_score()) == (1, 1.0)
        fake.on_query = lambda query: ()
        assert (mesh.workers(), mesh.devices(), mesh.device_count(), mesh.total_score()) == ([], [], 0, 0.0)


def test_what_waits_is_asked_of_the_coordinator(fake: FakeMesh) -> None:
    row = {"functions": ("train",), "needs": "1 GPU", "count": 3, "client": "me", "state": "infeasible", "reason": "no GPU"}
    fake.on_query = lambda query: (row,) if query.what == "waiting" else ()
    with GPUMesh(fake.url, token="secret") as mesh:
        assert mesh.waiting() == [{**row, "functions": ["train"]}]


def test_distribute_is_a_map_with_a_limit(fake: FakeMesh) -> None:
    with GPUMesh(fake.url, token="secret") as mesh:
        own = accelerate(timeout=7, retries=1)(identity)
        streams = [
            mesh.distribute(function=identity, params=[{"value": 1}], retries=0),
            mesh.distribute(identity, [1], timeout=None),
            mesh.distribute(own, [1], timeout=9),
            mesh.distribute(own, [1]),
        ]
        specs = [stream._feed._handle.spec for stream in streams]

        assert [list(stream) for stream in streams] == [[0], [1], [2], [3]]
        assert [(spec.timeout, spec.retries) for spec in specs] == [(300.0, 0), (0.0, 3), (9.0, 1), (7.0, 1)]
        with pytest.raises(TypeError, match="did you mean 'retries'"):
            mesh.distribute(identity, [1], retrie=1)


# --- travelling


def test_neither_token_nor_address_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = GPUMesh("http://secret-host:8000", token="very-secret")
    data = pickle.dumps(mesh)

    assert b"secret" not in data
    monkeypatch.setattr(mesh_module, "_default", None)
    assert isinstance(pickle.loads(data), GPUMesh)
    mesh.close()


# --- saying more


def test_verbose_says_where_tasks_ran(
    fake: FakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUMESH_VERBOSE", "1")
    logger = logging.getLogger("gpumesh")
    before = logger.level
    try:
        with GPUMesh(fake.url, token="secret") as mesh:
            function = accelerate(mesh)(identity)
            function.remote(1).result(5)
            list(function.map([1, 2, 3]))
    finally:
        logger.setLevel(before)
    told = [record.message for record in caplog.records if record.levelno == logging.INFO]

    assert any("identity finished in" in text and "on w>" in text for text in told)
    assert any(text.startswith("identity: 3 tasks ended, 0 of them failed; w 3 in") for text in told)


# --- the package


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import sys, gpumesh; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert not {"asyncio", "threading", "socket", "pickle", "numpy", "gpumesh.client.mesh", "cloudpickle", "msgpack"} & set(
        loaded
    )


def test_using_the_package_loads_no_event_loop_and_no_numbers() -> None:
    program = "import sys; from gpumesh import *; GPUMesh('h:1', token='t').close(); print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert not {"asyncio", "numpy", "torch", "pandas", "rich", "typer", "psutil", "inspect", "cloudpickle"} & set(loaded)


def test_every_public_name_is_there_and_documented() -> None:
    for name in gpumesh.__all__:
        found = getattr(gpumesh, name)
        assert name in dir(gpumesh)
        assert name == "__version__" or inspect.getdoc(found)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gpumesh.nonsense  # type: ignore[attr-defined]
