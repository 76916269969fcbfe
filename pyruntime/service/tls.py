"""The server's certificate on disk: checked at the start, and read again at the first handshake after it changed."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import grpc

from pyruntime.config import Settings
from pyruntime.errors import UnsafeTransport

log = logging.getLogger(__name__)

# Changes when a file is written, or replaced as secrets that are mounted are: through a link.
Stamp = tuple[tuple[int, int, int], ...]


class Pem(NamedTuple):
    """One consistent reading. ``client_ca``: None when clients need no certificate."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)


class TlsFiles:
    """Certificate chain, key and, for mutual TLS, the authorities of the clients. Raises ``UnsafeTransport``.

    A change that cannot be used, such as a certificate whose key is not there yet, leaves the former files in force and
    is logged once. Connections that are open go on with what they began with.
    """

    def __init__(self, certificate: str, key: str, client_ca: str = "") -> None:
        self._paths = [Path(certificate), Path(key)] + ([Path(client_ca)] if client_ca else [])
        self._names = ("--tls-certificate", "--tls-key", "--tls-client-ca")
        self._lock = threading.Lock()
        self._tried = self._look()
        self._pem = self._read()
        self._problem = ""

    def credentials(self) -> grpc.ServerCredentials:
        """For one port. Keep them as long as the server: grpc does not."""
        with self._lock:
            pem = self._pem
        served = [pem]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """What this port serves from now on, asked at every handshake; None: what it has."""
            latest = self.current()
            if latest is served[0]:
                return None
            served[0] = latest
            return latest.configuration()

        # The stubs do not know that None is an answer.
        initial, ask = pem.configuration(), cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
        return grpc.dynamic_ssl_server_credentials(initial, ask, pem.client_ca is not None)

    def current(self) -> Pem:
        """The files as they are now, or the last ones that could be used. May be called from any thread."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp == self._tried:
                    return self._pem
                self._tried = stamp
                self._pem = self._read()
                self._problem = ""
                log.info("the certificate %s has changed and is in force", self._paths[0])
            except UnsafeTransport as problem:
                if str(problem) != self._problem:  # not again at every handshake
                    log.warning("the former certificate stays in force: %s", problem)
                self._problem = str(problem)
            return self._pem

    def _look(self) -> Stamp:
        found = []
        for name, path in zip(self._names, self._paths, strict=False):
            try:
                status = os.stat(path)
            except OSError as error:
                raise UnsafeTransport(f"{name}: {path} cannot be read: {error.strerror}") from error
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _read(self) -> Pem:
        pem = self._bytes()
        certificate, key = self._paths[:2]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key, password=_refuse_passphrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            problem = getattr(error, "reason", None) or error
            raise UnsafeTransport(
                f"--tls-certificate and --tls-key: {certificate} and {key} are no pair of PEM files that can be used: "
                f"{problem}"
            ) from error
        if pem.client_ca is not None:
            _check_authorities(self._paths[2])
        if self._bytes() != pem:  # else what was checked may not be what is served
            raise UnsafeTransport(f"--tls-certificate: {certificate} changed while it was read")
        return pem

    def _bytes(self) -> Pem:
        found = []
        for name, path in zip(self._names, self._paths, strict=False):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise UnsafeTransport(f"{name}: {path} cannot be read: {error.strerror}") from error
        return Pem(found[0], found[1], found[2] if len(found) > 2 else None)


def tls_files(settings: Settings) -> TlsFiles | None:
    """None without TLS. Raises ``UnsafeTransport`` for files that are not there, not whole or not a pair."""
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        missing = "--tls-key" if settings.tls_certificate else "--tls-certificate"
        raise UnsafeTransport(f"{missing} is missing: a certificate and its key go together")
    if not settings.tls_certificate:
        if settings.tls_client_ca:
            raise UnsafeTransport("--tls-client-ca needs --tls-certificate and --tls-key")
        return None
    return TlsFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)


def _check_authorities(path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)  # not its text, which may have comments in any language
    except OSError as error:  # ssl.SSLError is one
        problem = getattr(error, "reason", None) or error
        raise UnsafeTransport(f"--tls-client-ca: {path} holds no PEM certificates: {problem}") from error


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase, for which there is nobody to ask")
