"""TLS and mutual TLS, with files that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc
import pytest
import trustme

from pyruntime.errors import UnsafeTransport
from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import build_server
from pyruntime.service.tls import TlsFiles, tls_files
from pyruntime.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc, model_pb2, model_pb2_grpc
from tests.fakes import play
from tests.service.transport import Certificates, fresh_channel, running, settings


@pytest.fixture(scope="module")
def authority_of_others() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def names(address: str, credentials: grpc.ChannelCredentials) -> list[str]:
    async with fresh_channel(address, credentials) as channel:
        answer = await model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest(), timeout=10)
        return [model.name for model in answer.models]


async def refused(address: str, credentials: grpc.ChannelCredentials) -> bool:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await names(address, credentials)
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def presented(address: str) -> str:
    """The certificate that a new connection sees."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def test_clients_trust_the_authority_or_are_not_served(files, tmp_path_factory):
    others = Certificates(tmp_path_factory.mktemp("others"))
    async with running(files.settings()) as (server, _):
        assert await names(server.address, files.client()) == ["decoder", "encoder"]
        assert await refused(server.address, others.client())
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest(), timeout=10)


async def test_mutual_tls_wants_a_certificate_of_its_authority(files, authority_of_others):
    async with running(files.settings(tls_client_ca=files.ca)) as (server, _):
        assert await names(server.address, files.client(files.authority)) == ["decoder", "encoder"]
        assert await refused(server.address, files.client())
        assert await refused(server.address, files.client(authority_of_others))


async def test_admin_has_the_same_tls(files, authority_of_others):
    options = files.settings(tls_client_ca=files.ca, admin_address="127.0.0.1:0")
    async with running(options, manager=True) as (server, _):
        async with fresh_channel(server.admin.address, files.client(files.authority)) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            assert len((await stub.ListModelStates(admin_pb2.ListModelStatesRequest())).models) == 2
        async with fresh_channel(server.admin.address, files.client(authority_of_others)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                await stub.ListModelStates(admin_pb2.ListModelStatesRequest(), timeout=10)


async def test_a_rotated_certificate_is_served_and_no_call_is_dropped(files):
    async with running(files.settings()) as (server, registry):
        stream = play("abc")
        stream.hold = 1
        engine = next(model.engine for model in registry.serving() if model.info.name == "decoder")
        engine.next_stream = stream
        async with fresh_channel(server.address, files.client()) as channel:
            call = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(generate_pb2.GenerateRequest(text="x"))
            assert (await call.read()).text == "a"
            before = await asyncio.to_thread(presented, server.address)
            for _ in range(3):
                chain = files.rotate().decode()
                now = await asyncio.to_thread(presented, server.address)
                assert now != before and now.strip() in chain
                assert await names(server.address, files.client()) == ["decoder", "encoder"]
                before = now
            stream.stopped.set()
            assert [(await call.read()).text for _ in range(2)] == ["b", "c"]
            assert await call.read() is grpc.aio.EOF


async def test_rotated_authorities_of_clients(files, authority_of_others):
    async with running(files.settings(tls_client_ca=files.ca)) as (server, _):
        authority_of_others.cert_pem.write_to_path(files.ca)
        assert await names(server.address, files.client(authority_of_others)) == ["decoder", "encoder"]
        assert await refused(server.address, files.client(files.authority))


@pytest.mark.parametrize("harm", ["half", "other key", "gone", "garbage ca"])
async def test_what_cannot_be_used_leaves_the_former_in_force(files, harm, caplog):
    async with running(files.settings(tls_client_ca=files.ca)) as (server, _):
        caplog.set_level(logging.WARNING)
        before = files.client(files.authority)
        spoil(files, harm)
        for _ in range(3):
            assert await names(server.address, before) == ["decoder", "encoder"]
        assert caplog.text.count("the former certificate stays in force") == 1
        files.authority.cert_pem.write_to_path(files.ca)
        files.rotate()  # and it recovers
        assert await names(server.address, before) == ["decoder", "encoder"]
        assert caplog.text.count("the former certificate stays in force") == 1


def spoil(files: Certificates, harm: str) -> None:
    if harm == "half":
        whole = Path(files.certificate).read_bytes()
        Path(files.certificate).write_bytes(whole[: len(whole) // 2])
    elif harm == "other key":
        files.authority.issue_cert("localhost").private_key_pem.write_to_path(files.key)
    elif harm == "gone":
        Path(files.key).unlink()
    else:
        Path(files.ca).write_bytes(b"no certificate")


async def test_a_secret_that_is_swapped_through_a_link_is_seen(files, tmp_path):
    """As Kubernetes does it: the files are links into a folder that is itself replaced behind a link."""
    mount = tmp_path / "mount"
    mount.mkdir()
    for version in ("1", "2"):
        folder = tmp_path / f"version{version}"
        folder.mkdir()
        files.certificate, files.key = str(folder / "tls.crt"), str(folder / "tls.key")
        files.rotate()
    (mount / "data").symlink_to(tmp_path / "version1")
    for name in ("tls.crt", "tls.key"):
        (mount / name).symlink_to(mount / "data" / name)
    options = settings(tls_certificate=str(mount / "tls.crt"), tls_key=str(mount / "tls.key"))
    async with running(options) as (server, _):
        first = await asyncio.to_thread(presented, server.address)
        (mount / "new").symlink_to(tmp_path / "version2")
        (mount / "new").replace(mount / "data")
        second = await asyncio.to_thread(presented, server.address)
        assert first != second
        assert second.strip() in (tmp_path / "version2" / "tls.crt").read_text()


def test_problems_of_the_start(files, tmp_path):
    def problem(**changes: str) -> str:
        with pytest.raises(UnsafeTransport) as caught:
            tls_files(settings(**changes))
        return str(caught.value)

    pair = {"tls_certificate": files.certificate, "tls_key": files.key}
    missing = str(tmp_path / "missing.pem")
    assert problem(tls_certificate=files.certificate).startswith("--tls-key is missing")
    assert problem(tls_key=files.key).startswith("--tls-certificate is missing")
    assert problem(tls_client_ca=files.ca) == "--tls-client-ca needs --tls-certificate and --tls-key"
    assert problem(**pair | {"tls_key": missing}) == f"--tls-key: {missing} cannot be read: No such file or directory"
    assert "--tls-client-ca" in problem(**pair, tls_client_ca=missing)
    assert "KEY_VALUES_MISMATCH" in problem(**pair | {"tls_key": _other_key(files)})
    assert "passphrase" in problem(**pair | {"tls_key": _locked_key(files)})
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    assert "holds no PEM certificates" in problem(**pair, tls_client_ca=str(empty))
    assert "no pair of PEM files" in problem(**pair | {"tls_certificate": str(empty)})


async def test_a_server_is_not_built_with_them(files):
    with pytest.raises(UnsafeTransport):
        build_server(ModelRegistry(), settings(tls_certificate=files.certificate, tls_key=_other_key(files)))


def _other_key(files: Certificates) -> str:
    path = files.folder / "other.key"
    files.authority.issue_cert("localhost").private_key_pem.write_to_path(str(path))
    return str(path)


def _locked_key(files: Certificates) -> str:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x"))
    path = files.folder / "locked.key"
    path.write_bytes(key.private_bytes(*form))
    return str(path)


def test_authorities_may_have_comments_in_any_language(tmp_path):
    files = Certificates(tmp_path)
    bundle = Path(files.ca)
    bundle.write_bytes("# Autorit\u00e9 de Z\u00fcrich\n".encode() + bundle.read_bytes())
    assert TlsFiles(files.certificate, files.key, files.ca).current().client_ca == bundle.read_bytes()
