"""The certificate that a coordinator makes for itself, or is given."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
from pathlib import Path

import pytest

from gpumesh.network.certificates import load_or_make_identity, read_identity, state_folder
from gpumesh.network.tls import binding_of, client_context, server_context


def test_it_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "gpumesh"

    first = load_or_make_identity(str(folder))
    second = load_or_make_identity(str(folder))

    assert first == second
    assert stat.S_IMODE(os.stat(first.key).st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [file.name for file in folder.iterdir()] == ["identity.pem"]


def test_a_key_that_others_could_read_is_closed_to_them_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = load_or_make_identity(str(tmp_path))
    assert caplog.records == []
    os.chmod(first.key, 0o644)

    again = load_or_make_identity(str(tmp_path))

    assert again == first
    assert stat.S_IMODE(os.stat(first.key).st_mode) == 0o600
    assert "others on this machine could read the key" in caplog.text


def test_it_lies_in_the_folder_for_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert state_folder() == str(tmp_path / "gpumesh")


def test_both_sides_of_a_connection_see_the_same_hash(tmp_path: Path) -> None:
    identity = load_or_make_identity(str(tmp_path))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(identity).wrap_bio(to_server, to_client, server_side=True)
    client = client_context().wrap_bio(to_client, to_server)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass

    assert binding_of(client) == identity.fingerprint
    assert client.selected_alpn_protocol() == "gpumesh/1"
    assert client.version() == "TLSv1.3"


def test_the_first_certificate_of_a_chain_counts(tmp_path: Path) -> None:
    leaf = load_or_make_identity(str(tmp_path / "leaf"))
    other = load_or_make_identity(str(tmp_path / "other"))
    chain = tmp_path / "chain.pem"
    chain.write_text(Path(leaf.certificate).read_text() + Path(other.certificate).read_text())

    read = read_identity(str(chain), leaf.key)

    pem = Path(leaf.certificate).read_text()
    assert read.fingerprint == hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERT") :])).digest()


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    one = load_or_make_identity(str(tmp_path / "one"))
    two = load_or_make_identity(str(tmp_path / "two"))
    key = tmp_path / "key.pem"
    key.write_text(Path(two.key).read_text().partition("-----BEGIN CERT")[0])
    certificate = tmp_path / "certificate.pem"
    certificate.write_text("-----BEGIN CERT" + Path(one.certificate).read_text().partition("-----BEGIN CERT")[2])

    with pytest.raises(OSError, match="cannot be used with the certificate"):
        read_identity(str(certificate), str(key))


@pytest.mark.parametrize("content", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA"])
def test_a_file_without_a_certificate_is_named(tmp_path: Path, content: str) -> None:
    identity = load_or_make_identity(str(tmp_path))
    broken = tmp_path / "broken.pem"
    broken.write_text(content)

    with pytest.raises(OSError, match="broken.pem holds no certificate in PEM form"):
        read_identity(str(broken), identity.key)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot read the certificate .*gone.pem: No such file"):
        read_identity(str(tmp_path / "gone.pem"), str(tmp_path / "gone.pem"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match=r"cannot keep a certificate in .*; make the folder writable, or give --cert and --key"):
        load_or_make_identity(str(tmp_path / "file" / "state"))
