"""Bearer tokens: who may call what, from a file that changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.errors import CredentialsMissing, CredentialsWrong, NotPermitted, UnsafeTransport
from pyruntime.service import tokens
from pyruntime.service.tokens import TokenFile
from pyruntime.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc, model_pb2, model_pb2_grpc
from tests.service.conftest import Failure, failure_of
from tests.service.transport import RawClient, by_hand, frame, running, settings

ALICE, BOB, OLD = "alice-0123456789abcdef", "bob-0123456789abcdef==", "old-0123456789abcdef"
METHODS = ["/pyruntime.v1.EmbedService/Embed", "/pyruntime.v1.EmbedService/EmbedStream", "/pyruntime.v1.M/Tokenize"]
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"# two\n\n{ALICE}\n  {BOB}  \n")
    return file


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def allowed(file: TokenFile, token: str, method: str = METHODS[0]) -> bool:
    return file.refusal(method, [f"Bearer {token}"]) is None


def test_tokens_of_a_file(path):
    file = TokenFile("--token-file", str(path), METHODS)
    assert allowed(file, ALICE) and allowed(file, BOB)
    for header in (f"bearer {ALICE}", f"BEARER  {ALICE} "):
        assert file.refusal(METHODS[0], [header]) is None
    assert isinstance(file.refusal(METHODS[0], []), CredentialsMissing)
    wrong = [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ALICE}",
        ALICE,
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE}x",
        "Bearer \udcff",
    ]
    for header in wrong:
        refusal = file.refusal(METHODS[0], [header])
        assert isinstance(refusal, CredentialsWrong), header
        assert ALICE[:-1] not in refusal.message
    assert isinstance(file.refusal(METHODS[0], [f"Bearer {ALICE}"] * 2), CredentialsWrong)


def test_every_token_is_compared_whatever_comes(path, monkeypatch):
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    file = TokenFile("--token-file", str(path), METHODS)
    monkeypatch.setattr(tokens, "hmac", SimpleNamespace(compare_digest=compare))
    for token in (ALICE, BOB, "nobody-0123456789abcdef", "x"):
        compared.clear()
        allowed(file, token)
        assert len(compared) == 2
        assert {len(each) for pair in compared for each in pair} == {32}  # hashes: a length tells nothing either


def test_methods_of_a_token(path):
    path.write_text(f"{ALICE} EmbedService\n{BOB} Tokenize,Embed\n{OLD}\n")
    file = TokenFile("--token-file", str(path), METHODS)
    assert [allowed(file, ALICE, method) for method in METHODS] == [True, True, False]
    assert [allowed(file, BOB, method) for method in METHODS] == [True, False, True]
    assert all(allowed(file, OLD, method) for method in METHODS)
    assert allowed(file, ALICE, REFLECT) and not allowed(file, OLD + "x", REFLECT)
    refusal = file.refusal(METHODS[2], [f"Bearer {ALICE}"])
    assert isinstance(refusal, NotPermitted) and ALICE not in refusal.message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has 0 tokens"),
        ("# none\n", "has 0 tokens"),
        ("short\n", "line 1 of .* has a token that is not 16 to 512"),
        (f"{ALICE}\nwith,comma-0123456789abcdef\n", "line 2 of"),
        (f"{ALICE} Embedd\n", "line 1 of .* names an unknown method; known: .*Embed"),
        (b"\n\xff\n", "line 2 of .* is not UTF-8"),
        ("".join(f"token-0123456789-{i}\n" for i in range(1001)), "has 1001 tokens"),
    ],
)
def test_files_that_are_refused(path, content, problem):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UnsafeTransport, match=problem) as caught:
        TokenFile("--token-file", str(path), METHODS)
    assert "0123456789" not in str(caught.value)


def test_a_file_that_changes(path, caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    file = TokenFile("--token-file", str(path), METHODS, clock)
    path.write_text(f"{BOB}\n{OLD}-and-longer\n")
    assert allowed(file, ALICE)  # not every call looks
    clock.now += 1.5
    assert not allowed(file, ALICE) and allowed(file, BOB) and allowed(file, f"{OLD}-and-longer")
    path.write_text("half a tok")
    for _ in range(3):
        clock.now += 1.5
        assert allowed(file, BOB)
    path.unlink()
    for _ in range(3):
        clock.now += 1.5
        assert allowed(file, BOB)
    assert caplog.text.count("the former tokens stay in force") == 2
    path.write_text(f"{ALICE}\n")
    clock.now += 1.5
    assert allowed(file, ALICE) and not allowed(file, BOB)
    assert not any(token in caplog.text for token in (ALICE, BOB, OLD, "half a tok"))


# -- over the wire ------------------------------------------------------------------------------------


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def answer(channel: grpc.aio.Channel, token: str | None) -> Failure | None:
    """Of ListModels: None when it was answered."""
    stub = model_pb2_grpc.ModelServiceStub(channel)
    call = stub.ListModels(model_pb2.ListModelsRequest(), metadata=bearer(token) if token else None)
    if (await call.code()) is grpc.StatusCode.OK:
        return None
    return await failure_of(call)


async def test_calls_need_one_of_the_tokens(path, caplog):
    caplog.set_level(logging.DEBUG)
    options = settings(token_file=str(path))
    async with running(options) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        assert await answer(channel, ALICE) is None
        assert await answer(channel, BOB) is None
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        streamed = await failure_of(stub.GenerateStream(generate_pb2.GenerateRequest(text="x")))
        for failure, reason in (
            (await answer(channel, None), "CREDENTIALS_MISSING"),
            (await answer(channel, OLD), "CREDENTIALS_WRONG"),
            (streamed, "CREDENTIALS_MISSING"),
        ):
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert not any(token in caplog.text for token in (ALICE, BOB, OLD))


async def test_what_does_not_exist_needs_a_token_too(path):
    async with running(settings(token_file=str(path))) as (server, _):
        assert (await by_hand(server.port, "/pyruntime.v1.Nothing/AtAll", frame(b""))).code == 16
        assert (await by_hand(server.port, REFLECT, frame(b""))).code == 16
        assert (await by_hand(server.port, "/pyruntime.v1.Nothing/AtAll", frame(b""), list(bearer(ALICE)))).code == 12


async def test_a_refused_message_is_not_waited_for(path):
    """The server answers at the headers, though the message that they announce never comes."""

    def work(port: int) -> int | None:
        with RawClient(port) as client:
            stream = client.open("/pyruntime.v1.EmbedService/Embed")
            client.send(stream, frame(b"", length=60_000), end=False)
            return client.finish(stream).code

    async with running(settings(token_file=str(path))) as (server, _):
        assert await asyncio.to_thread(work, server.port) == 16


@pytest.mark.parametrize(
    ("access", "health", "reflection"),
    [({}, 0, 16), ({"health": "token"}, 16, 16), ({"reflection": "open"}, 0, 0), ({"reflection": "off"}, 0, 16)],
)
async def test_health_and_reflection(path, access, health, reflection):
    async with running(settings(token_file=str(path), **access)) as (server, _):
        assert (await by_hand(server.port, "/grpc.health.v1.Health/Check", frame(b""))).code == health
        assert (await by_hand(server.port, REFLECT, b"")).code == reflection
        with_token = await by_hand(server.port, REFLECT, b"", list(bearer(ALICE)))
        assert with_token.code == (12 if access.get("reflection") == "off" else 0)


async def test_operators_have_tokens_of_their_own(path, tmp_path):
    operators = tmp_path / "operators"
    operators.write_text(f"{OLD}\nwatcher-0123456789abcdef ListModelStates\n")
    options = settings(token_file=str(path), admin_token_file=str(operators), admin_address="127.0.0.1:0")
    async with (
        running(options, manager=True) as (server, _),
        grpc.aio.insecure_channel(server.admin.address) as channel,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        states = admin_pb2.ListModelStatesRequest()
        assert len((await stub.ListModelStates(states, metadata=bearer(OLD))).models) == 2
        watcher = bearer("watcher-0123456789abcdef")
        assert len((await stub.ListModelStates(states, metadata=watcher)).models) == 2
        failure = await failure_of(stub.UnloadModel(admin_pb2.UnloadModelRequest(name="encoder"), metadata=watcher))
        assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED")
        failure = await failure_of(stub.ListModelStates(states, metadata=bearer(ALICE)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_WRONG")
        assert (await stub.UnloadModel(admin_pb2.UnloadModelRequest(name="encoder"), metadata=bearer(OLD))) is not None
        async with grpc.aio.insecure_channel(server.address) as models:
            assert (await answer(models, OLD)).reason == "CREDENTIALS_WRONG"


@pytest.mark.parametrize("line", ["# a comment", ALICE])
def test_a_mark_before_the_first_line_is_none_of_it(path, line):
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\n{BOB}\n".encode())
    file = TokenFile("--token-file", str(path), METHODS)
    assert allowed(file, BOB)
    assert allowed(file, ALICE) == (line == ALICE)
