"""Bearer tokens in a file, which is read again when it changes.

One token a line, with the methods that it may call behind it where those are not all::

    # for the indexing job: embeddings alone
    XcYoBUBq3nJk7zq0vLrEEg  EmbedService,Tokenize
    0Z2xC0zqDl6lpqSdk2r9Pw
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pyruntime.errors import CredentialsMissing, CredentialsWrong, NotPermitted, PyruntimeError, UnsafeTransport

log = logging.getLogger(__name__)

# As RFC 6750 has them; long enough that none is guessed, short enough for one header.
TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]{16,512}={0,2}")
MAX_TOKENS = 1000
MAX_FILE_BYTES = 2**20
# How often, in seconds, calls look whether the file has changed.
LOOK_AGAIN_S = 1.0
SCHEME = "bearer "

# Of each token, its SHA-256 and what it may call; None: everything.
Grants = dict[bytes, frozenset[str] | None]


class TokenFile:
    """Who may call what. Raises ``UnsafeTransport`` when the file cannot be used.

    ``option`` names the file in messages. ``methods``: what a token may be kept to, as gRPC has it,
    ``/package.Service/Method``; for any other method, as of reflection, any token will do.
    A later change that cannot be used leaves the former tokens in force and is logged once.
    """

    def __init__(
        self, option: str, path: str, methods: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._option = option
        self._path = Path(path)
        self._methods = frozenset(methods)
        self._words = _words(self._methods)
        self._clock = clock
        self._look_at = clock() + LOOK_AGAIN_S
        self._stamp = self._look()
        self._grants = self._read()
        self._problem = ""

    def refusal(self, method: str, authorization: list[str]) -> PyruntimeError | None:
        """Why a call must not go on; None when it may. ``authorization``: the values of that header."""
        self._refresh()
        if not authorization:
            return CredentialsMissing("no credentials: this method needs `authorization: Bearer TOKEN` in its metadata")
        header = authorization[0]
        if len(authorization) > 1 or header[: len(SCHEME)].lower() != SCHEME:
            return CredentialsWrong("the authorization header is not one bearer token")
        found, grant = self._find(header[len(SCHEME) :].strip())
        if not found:
            return CredentialsWrong("the bearer token is not one that this server knows")
        if grant is not None and method in self._methods and method not in grant:
            return NotPermitted(f"the bearer token does not allow {method.removeprefix('/')}")
        return None

    def _find(self, token: str) -> tuple[bool, frozenset[str] | None]:
        """Compares with every token, and each in constant time: how long it takes tells nothing about them."""
        digest, found, grant = _digest(token), False, None
        for known, allowed in self._grants.items():
            if hmac.compare_digest(known, digest):
                found, grant = True, allowed
        return found, grant

    def _refresh(self) -> None:
        if self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_AGAIN_S
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._grants = self._read()
            self._problem = ""
            log.info("%s: %s has changed; %d tokens are in force", self._option, self._path, len(self._grants))
        except UnsafeTransport as problem:
            if str(problem) != self._problem:  # not again at every look
                log.warning("the former tokens stay in force: %s", problem)
            self._problem = str(problem)

    def _look(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise UnsafeTransport(f"{self._option}: {self._path} cannot be read: {error.strerror}") from error
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> Grants:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            lines = content.decode("utf-8-sig").splitlines()  # some editors put a mark before the first line
        except OSError as error:
            raise UnsafeTransport(f"{self._option}: {self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise self._bad(1 + content[: error.start].count(b"\n"), "is not UTF-8") from None
        grants: Grants = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                grants[self._checked_digest(number, words[0])] = self._named_methods(number, words[1:])
        if not 1 <= len(grants) <= MAX_TOKENS or len(content) > MAX_FILE_BYTES:
            limit = f"allowed: 1 to {MAX_TOKENS} tokens in at most {MAX_FILE_BYTES} bytes"
            raise UnsafeTransport(f"{self._option}: {self._path} has {len(grants)} tokens; {limit}")
        return grants

    def _checked_digest(self, number: int, token: str) -> bytes:
        if not TOKEN.fullmatch(token):  # which is not shown: it may be a token with a slip in it
            raise self._bad(number, "has a token that is not 16 to 512 of the characters A-Z a-z 0-9 - . _ ~ + /")
        return _digest(token)

    def _named_methods(self, number: int, words: list[str]) -> frozenset[str] | None:
        if not words:
            return None
        names = [name for word in words for name in word.split(",") if name]
        # Whatever is behind a token is not shown either: it may be the rest of one.
        if any(name not in self._words for name in names):
            raise self._bad(number, f"names an unknown method; known: {', '.join(sorted(self._words))}")
        return frozenset[str]().union(*(self._words[name] for name in names))

    def _bad(self, number: int, problem: str) -> UnsafeTransport:
        return UnsafeTransport(f"{self._option}: line {number} of {self._path} {problem}")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _words(methods: Iterable[str]) -> dict[str, frozenset[str]]:
    """What a line may name: a service, by its last name, or a method."""
    words: dict[str, frozenset[str]] = {}
    for method in methods:
        service, _, name = method.removeprefix("/").partition("/")
        words[name] = words.get(name, frozenset()) | {method}
        short = service.rpartition(".")[2]
        words[short] = words.get(short, frozenset()) | {method}
    return words
