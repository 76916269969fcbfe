"""TLS, mutual TLS, tokens, Unix sockets and addresses, from the clients' side."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pyruntime.client import NEVER, ApiError, AsyncClient, Client, cli
from pyruntime.client.connection import bearer, check_target, is_local
from pyruntime.v1 import model_pb2
from tests.service.secured import TOKEN, pem_files, served


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Any]:
    return pem_files(tmp_path_factory.mktemp("pem"))


async def outcomes(address: str, **security) -> list[str]:
    """What each client is told: a text and a streamed one, or the code of the error."""

    def work() -> list[str]:
        with Client(address, retry=NEVER, **security) as client:
            return [client.generate("a"), "".join(client.stream("a")), str(len(list(client.embed_stream(["a", "b"]))))]

    async def asynchronous() -> list[str]:
        async with AsyncClient(address, retry=NEVER, **security) as client:
            streamed = [piece async for piece in client.stream("a")]
            vectors = [each async for each in client.embed_stream(["a", "b"])]
            return [await client.generate("a"), "".join(streamed), str(len(vectors))]

    found = []
    for run in (asyncio.to_thread(work), asynchronous()):
        try:
            found.append(" ".join(await run))
        except ApiError as error:
            found.append(error.code)
    return found


GOOD, NO = ["ok ok 2"] * 2, ["UNAVAILABLE"] * 2


async def test_an_encrypted_server_is_reached_by_those_who_trust_it(files):
    async with served(tls_certificate=files["server"], tls_key=files["server_key"]) as address:
        assert await outcomes(address, root_certificates=files["ca"]) == GOOD
        assert await outcomes(address, root_certificates=files["pem"], tls=True) == GOOD
        named = {"root_certificates": files["ca"], "server_name": "models.example"}
        assert await outcomes(address, **named) == GOOD
        assert await outcomes(address, **named | {"server_name": "other.example"}) == NO
        assert await outcomes(address, root_certificates=files["stranger"]) == NO
        assert await outcomes(address, tls=True) == NO
        assert await outcomes(address) == NO


async def test_mutual_tls(files):
    settings = {"tls_certificate": files["server"], "tls_key": files["server_key"], "tls_client_ca": files["ca"]}
    async with served(**settings) as address:
        trust = {"root_certificates": files["ca"]}
        assert await outcomes(address, **trust, certificate=files["client"], key=files["client_key"]) == GOOD
        assert await outcomes(address, **trust) == NO


async def test_the_token_goes_with_every_call_those_of_the_stubs_included(files):
    async with served(token_file=files["tokens"]) as address:
        assert await outcomes(address, token=TOKEN) == GOOD
        assert await outcomes(address, token=f" {TOKEN}\n") == GOOD
        assert await outcomes(address, token="wrong") == ["UNAUTHENTICATED"] * 2
        assert await outcomes(address) == ["UNAUTHENTICATED"] * 2
        turns = iter(["wrong", TOKEN])
        with Client(address, token=lambda: next(turns), retry=NEVER) as client:  # as one that is read from a file
            with pytest.raises(ApiError, match="UNAUTHENTICATED"):
                await asyncio.to_thread(client.models)
            assert len(await asyncio.to_thread(client.models)) == 1
        request = model_pb2.ListModelsRequest()
        with Client(address, token=TOKEN) as client:
            response = await asyncio.to_thread(client.model_stub.ListModels, request)
            assert len(response.models) == 1
        async with AsyncClient(address, token=TOKEN) as client:
            assert len((await client.model_stub.ListModels(request, metadata=(("mine", "1"),))).models) == 1


async def test_metadata_of_the_caller_s_own_goes_with_every_call():
    seen: list[dict[str, str]] = []

    def look(details: grpc.HandlerCallDetails) -> None:
        seen.append(dict(details.invocation_metadata))

    class Looking(grpc.GenericRpcHandler):
        def service(self, details):
            return look(details)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Looking(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    turns = iter("1234")
    options = {"token": TOKEN, "metadata": lambda: [("traceparent", next(turns))]}

    def work() -> None:
        with Client(f"127.0.0.1:{port}", **options) as client:
            for call in (client.models, lambda: next(client.stream("a"))):
                with pytest.raises(ApiError, match="UNIMPLEMENTED"):
                    call()

    await asyncio.to_thread(work)
    async with AsyncClient(f"127.0.0.1:{port}", **options) as client:
        for call in (client.models(), anext(client.stream("a"))):
            with pytest.raises(ApiError, match="UNIMPLEMENTED"):
                await call
    await server.stop(0)
    assert [each["traceparent"] for each in seen] == list("1234")
    assert {each["authorization"] for each in seen} == {f"Bearer {TOKEN}"}
    assert len({each["x-request-id"] for each in seen}) == 4


async def test_a_unix_socket(tmp_path, files):
    async with served(host=f"unix:{tmp_path}/socket", token_file=files["tokens"]) as address:
        assert address == f"unix:{tmp_path}/socket"
        assert await outcomes(address, token=TOKEN) == GOOD


async def test_the_command_line_has_all_of_it(files, capsys, monkeypatch, tmp_path):
    async def run(address: str, *options: str) -> int:
        return await asyncio.to_thread(cli.main, ["models", "--target", address, *options])

    settings = {"tls_certificate": files["server"], "tls_key": files["server_key"], "tls_client_ca": files["ca"]}
    async with served(**settings, token_file=files["tokens"]) as address:
        secure = ("--ca", files["ca"], "--certificate", files["client"], "--key", files["client_key"])
        assert await run(address, *secure, "--token-file", files["tokens"]) == 2  # of the server's form, not one token
        assert "holds more than a token" in capsys.readouterr().err
        token = tmp_path / "token"
        token.write_text(f"{TOKEN}\n")
        assert await run(address, *secure, "--token-file", str(token)) == 0
        assert await run(address, *secure) == 1
        assert "UNAUTHENTICATED" in capsys.readouterr().err
        monkeypatch.setenv("PYRUNTIME_TOKEN", TOKEN)
        assert await run(address, *secure) == 0
        assert await run(address, "--ca", "/nowhere") == 2
        assert "/nowhere" in capsys.readouterr().err
        assert TOKEN not in capsys.readouterr().err
        assert await run(address, "--tls", "--timeout", "20") == 1


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://127.0.0.1:50051", "is a URL"),
        ("https://models.example", "is a URL"),
        ("localhost", "is not HOST:PORT"),
        ("localhost:", "is not HOST:PORT"),
        (":50051", "is not HOST:PORT"),
        ("localhost:grpc", "is not HOST:PORT"),
        ("localhost:70000", "is not HOST:PORT"),
        ("::1:50051", "in brackets"),
    ],
)
def test_an_address_that_grpc_would_misread(target: str, says: str):
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=says):
            kind(target)


def test_addresses():
    for target in ("localhost:1", "[::1]:50051", "dns:///models.example:50051", "unix:/run/p", "ipv4:127.0.0.1:5"):
        check_target(target)
    local = ["localhost:1", "127.9.9.9:1", "[::1]:1", "unix:/run/p", "dns:///localhost:1", "ipv4:127.0.0.1:5"]
    assert all(is_local(target) for target in local)
    assert not any(is_local(target) for target in ("10.0.0.1:1", "models.example:1", "localhost.example:1"))


@pytest.mark.parametrize(
    ("security", "says"),
    [
        ({"token": TOKEN}, "unencrypted"),
        ({"certificate": b"x"}, "belong together"),
        ({"key": b"x"}, "belong together"),
        ({"tls": False, "root_certificates": b"x"}, "tls is False"),
        ({"root_certificates": b"x"}, "root_certificates: the bytes are no PEM"),
        ({"root_certificates": __file__ + "c"}, "No such file"),
    ],
)
def test_combinations_that_cannot_be_meant(security, says: str):
    with pytest.raises((ValueError, OSError), match=says) as caught:
        Client("models.example:50051", **security)
    assert TOKEN not in str(caught.value)


def test_what_is_not_refused():
    for security in ({"token": TOKEN, "tls": False}, {"token": TOKEN, "tls": True}, {"server_name": None}):
        Client("models.example:50051", **security).close()
    with pytest.raises(TypeError, match="certificates"):
        Client("models.example:50051", certificates="ca")
    for bad in ("", " ", "two words", "line\nbreak", "nöt"):
        with pytest.raises(ValueError, match="printable ASCII"):
            bearer(bad)
    assert isinstance(grpc.ssl_channel_credentials(), grpc.ChannelCredentials)
