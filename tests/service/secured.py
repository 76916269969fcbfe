"""The real server with certificates, tokens and other settings, and the files that these name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trustme

from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import build_server
from pyruntime.types import Capability
from tests.fakes import fake_model
from tests.service.conftest import SETTINGS

TOKEN = "s3cret-token_0123456789"


def pem_files(folder: Path) -> dict[str, Any]:
    """Paths of new PEM files: an authority, a server's and a client's certificate and key, a stranger's authority.

    Of a file of tokens as well; ``pem`` is the authority's certificate itself.
    """
    authority, stranger = trustme.CA(), trustme.CA()
    written = {"ca": authority.cert_pem, "stranger": stranger.cert_pem}
    for name, issued in (
        ("server", authority.issue_cert("127.0.0.1", "models.example")),
        ("client", authority.issue_cert("client.example")),
    ):
        written |= {name: issued.cert_chain_pems[0], f"{name}_key": issued.private_key_pem}
    for name, pem in written.items():
        pem.write_to_path(str(folder / name))
    (folder / "tokens").write_text(f"# of tests\n{TOKEN}\n")
    paths: dict[str, Any] = {name: str(folder / name) for name in [*written, "tokens"]}
    return paths | {"pem": authority.cert_pem.bytes()}


@asynccontextmanager
async def served(**settings) -> AsyncIterator[str]:
    """The address of a server with these settings."""
    registry = ModelRegistry()
    server = build_server(registry, SETTINGS.model_copy(update=settings))
    await server.start()
    registry.declare("decoder")
    registry.set_serving("decoder", fake_model("decoder", {Capability.GENERATE, Capability.EMBED, Capability.SCORE}))
    try:
        yield server.address
    finally:
        await server.drain(0)
