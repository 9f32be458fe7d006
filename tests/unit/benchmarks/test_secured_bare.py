"""What bare `ssl` gives, as the limit for the mesh: real sockets, a real process, real encryption."""

from __future__ import annotations

import shutil
import sys

import pytest

from benchmarks.figures import ROWS
from benchmarks.secured import over_bare
from benchmarks.secured_bare import CIPHERS, ENDS, BareCopy, openssl_speed, parse_speed

pytest.importorskip("cryptography", reason="makes the certificate")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="part of the harness")


@pytest.mark.parametrize("kind", ENDS)
def test_what_goes_over_comes_back_and_the_other_process_ends_with_the_block(kind: str) -> None:
    with BareCopy(kind, 1) as bare:
        said = bytes(range(251)) * (len(bare.memory) // 251 + 1)
        bare.memory[:] = said[: len(bare.memory)]
        seconds = [bare.send()]
        bare.memory[:] = bytes(len(bare.memory))
        seconds += [bare.receive(), bare.send(), bare.receive()]

        assert bare.memory == said[: len(bare.memory)]
        assert bare.cipher in CIPHERS
    assert all(0 < elapsed < 10 for elapsed in seconds)
    assert bare.other.returncode == 0


@pytest.mark.parametrize("kind", ENDS)
def test_another_process_that_is_gone_is_an_error(kind: str) -> None:
    with BareCopy(kind, 4) as bare:
        bare.other.kill()
        bare.other.wait(10)

        with pytest.raises(OSError):
            bare.send()


def test_the_mesh_is_compared_with_the_better_kind_in_each_direction() -> None:
    metrics = {
        "bare_socket_to_gb_s": 0.8,
        "bare_memory_to_gb_s": 0.5,
        "bare_socket_from_gb_s": 0.4,
        "bare_memory_from_gb_s": 0.6,
        "tls_link_to_gb_s": 0.4,
        "tls_link_from_gb_s": 0.9,
    }

    found = over_bare(metrics)

    assert found == pytest.approx(
        {"bare_to_gb_s": 0.8, "tls_over_bare_to": 0.5, "bare_from_gb_s": 0.6, "tls_over_bare_from": 1.5}
    )
    shown = {row.metric for row in ROWS if row.workload == "tls_bulk"}
    assert {"tls_over_bare_to", "tls_over_bare_from", "openssl_gb_s", *(name for name in metrics if "bare" in name)} <= shown


def test_the_speed_of_a_cipher_is_what_openssl_says() -> None:
    assert parse_speed("+H:16384\n+F:25:AES-256-GCM:2955942190.16\n") == 2955942190.16
    assert parse_speed("+H:16384\n") is None
    assert parse_speed("+F:25:AES-256-GCM:fast\n") is None
    assert openssl_speed("a cipher that nobody has") is None


def test_openssl_is_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl"):
        speed = openssl_speed("TLS_AES_256_GCM_SHA384")
        assert speed is not None
        assert 1e6 < speed < 1e12
    monkeypatch.setenv("PATH", "")
    assert openssl_speed("TLS_AES_256_GCM_SHA384") is None
