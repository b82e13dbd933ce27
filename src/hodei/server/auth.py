"""Authentication by bearer tokens, whose hashes are in a file that only its owner can read.

A token is `hod_`, 40 base32 characters (200 random bits) and a checksum of 7, so that secret scanners find it and a
mistyped token differs from an unknown one. It is sent in the Authorization header, never in a URL. The file has one line
per token, `name role sha256`, and is read again when it changes: removing a line revokes the token within seconds, open
streams included.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from msgspec import Struct, structs
from starlette.types import Scope

from hodei.agent.credentials import CREDENTIAL_PREFIX, ENROLMENT_PREFIX
from hodei.backends.remote.registry import AgentRegistry, UnknownCredential
from hodei.model.errors import Conflict, InvalidInput, Unavailable
from hodei.server.errors import BadRequest, Forbidden, Unauthorized
from hodei.server.route import ANYONE, ENROLMENT, NODE, RANK, Policy, Principal, Role

log = logging.getLogger("hodei.server")
PREFIX = "hod_"
TOKEN_FILE = "token"
HASHES_FILE = "tokens"
RELOAD_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LONGEST = 200
_LOGIN_HINT = (
    "send the header 'Authorization: Bearer TOKEN'; the first token is in the file 'token' of the server's home "
    "directory, where the hodei command finds it, or in HODEI_TOKEN"
)


class Entry(Struct, frozen=True):
    who: Principal
    digest: bytes


class Authenticator(Protocol):
    """Maps a bearer token to its owner. The factory of an extension gets the server's home, and returns the authenticator
    and whether it has just created the first credential."""

    def find(self, token: str) -> Principal | None: ...

    def current(self, who: Principal) -> bool:
        """Whether the credential of `who` is still valid."""
        ...

    def role_of(self, name: str) -> Role | None:
        """The current role of that user; None if there is no such user, Unavailable if that is unknown."""
        ...


class Tokens:
    """The valid tokens. `path` None: only the given entries."""

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        *,
        path: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = tuple(entries)
        self._path = path
        self._monotonic = monotonic
        self._checked_s = monotonic()
        self._stamp = _file_stamp(path) if path else None
        self._error = ""

    @classmethod
    def load(cls, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> Tokens:
        """InvalidInput if the file is missing, malformed, or readable by others than its owner."""
        return cls(read_entries(path), path=path, monotonic=monotonic)

    def find(self, token: str) -> Principal | None:
        """Compares with every entry in constant time, so that timing reveals nothing."""
        self._refresh()
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found: Entry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return None if found is None else structs.replace(found.who, token=found.digest)

    def current(self, who: Principal) -> bool:
        """Whether the token of `who` still has that name and role."""
        self._refresh()
        return any(
            entry.digest == who.token and entry.who.name == who.name and entry.who.role == who.role
            for entry in self._entries
        )

    def role_of(self, name: str) -> Role | None:
        """The lowest role of the tokens of that name; None without a token.

        Unavailable while the token file is not usable: that does not mean that the user has no token."""
        self._refresh()
        if self._error:
            raise Unavailable(f"the roles of users are unknown: {self._error}", hint="see the server's log")
        return min((entry.who.role for entry in self._entries if entry.who.name == name), key=RANK.get, default=None)  # type: ignore[arg-type]

    def _refresh(self) -> None:
        now = self._monotonic()
        if self._path is None or now - self._checked_s < RELOAD_EVERY_S:
            return
        self._checked_s = now
        stamp = _file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries, self._error = read_entries(self._path), ""
        except InvalidInput as error:
            # Fail closed: keeping the old entries could lose a revocation.
            self._entries, self._error = (), error.message
            log.error("all tokens are refused until this is fixed: %s", error.message)


def authorize(policy: Policy, scope: Scope, tokens: Authenticator) -> Principal:
    """The caller; Unauthorized without a valid token, Forbidden if the policy does not allow its role."""
    if policy.rank == 0:
        return ANYONE
    token = bearer_token(scope)
    who = tokens.find(token)
    if who is None:
        if token.startswith(PREFIX) and not well_formed(token):
            raise _unauthorized("the token is incomplete or mistyped: its checksum does not match", "malformed")
        raise _unauthorized("the token is not known to this server")
    if not policy.allows(who.role):
        needed = next((f"the role {role}" for role, rank in RANK.items() if rank == policy.rank), "a joined agent")
        refusal = Forbidden(
            f"this needs {needed}; {who.name} has the role {who.role}",
            hint="ask an administrator for a token with that role",
        )
        refusal.who = who
        raise refusal
    return who


def authorize_agent(policy: Policy, scope: Scope, agents: AgentRegistry, tokens: Authenticator) -> Principal:
    """The host that calls; Unauthorized or Forbidden for all others."""
    secret = bearer_token(scope)
    try:
        if policy is ENROLMENT and secret.startswith(ENROLMENT_PREFIX):
            return Principal(f"enrolment:{agents.find_token(secret).id}", "viewer", agent=True)
        if policy is NODE and secret.startswith(CREDENTIAL_PREFIX):
            return Principal(f"node:{agents.find_node(secret).name}", "viewer", agent=True)
    except UnknownCredential as error:
        raise _unauthorized(error.message, error.kind) from None
    return authorize(policy, scope, tokens)


def bearer_token(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) > 1:
        raise BadRequest("the Authorization header is given more than once")
    if not given:
        raise _unauthorized("this needs a token", "missing")
    text: str = given[0].decode("latin-1").strip()
    scheme, _, token = text.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > _LONGEST:
        raise _unauthorized("the Authorization header has no bearer token", "malformed")
    return token


def _unauthorized(message: str, kind: str = "unknown") -> Unauthorized:
    refusal = Unauthorized(message, hint=_LOGIN_HINT, headers={"www-authenticate": 'Bearer realm="hodei"'})
    refusal.kind = kind
    return refusal


def check_not_revoked(who: Principal, tokens: Authenticator) -> None:
    """Unauthorized if the caller's token was replaced or revoked during the request."""
    if who is not ANYONE and not who.agent and not tokens.current(who):
        raise _unauthorized("the token was replaced or revoked during the request")


def new_token() -> str:
    body = base64.b32encode(secrets.token_bytes(25)).decode("ascii").lower()
    return PREFIX + body + _checksum(body)


def well_formed(token: str) -> bool:
    body = token.removeprefix(PREFIX)
    return len(body) == 47 and body[40:] == _checksum(body[:40])


def _checksum(body: str) -> str:
    return base64.b32encode(zlib.crc32(body.encode("ascii", "replace")).to_bytes(4, "big")).decode("ascii")[:7].lower()


def create_token(home: Path, *, name: str = "admin", role: Role = "admin") -> str:
    """Creates the first token: its hash in `home/tokens`, the token itself in `home/token`, both for the owner only.

    Conflict if `home/token` exists (even as a link); nothing is changed then.
    """
    plain = home / TOKEN_FILE
    if os.path.lexists(plain):
        raise Conflict(f"{plain} already exists", hint="remove it to create a new token")
    token = add_token(home / HASHES_FILE, name, role)
    # The hash first: a crash in between leaves a server that can get a new token, not a token that is refused.
    fd = os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    return token


def add_token(path: Path, name: str, role: Role) -> str:
    """Creates a token and adds its hash to the file at `path`; replaces an older token of that name."""
    if not _NAME.fullmatch(name) or role not in RANK:
        raise InvalidInput(
            f"{name[:80]!r} with the role {role!r} cannot be written to a token file",
            hint=f"names have letters, digits and ._@- only; roles are {', '.join(RANK)}",
        )
    token = new_token()
    entries = [entry for entry in read_entries(path) if entry.who.name != name] if os.path.lexists(path) else []
    entries.append(Entry(Principal(name, role), hashlib.sha256(token.encode()).digest()))
    text = "".join(f"{entry.who.name} {entry.who.role} {entry.digest.hex()}\n" for entry in entries)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    return token


def open_tokens(home: Path) -> tuple[Tokens, bool]:
    """The tokens of this home, and whether the first one was created now, because there was no token file.

    If only `home/token` is missing, it stays missing: an administrator may have moved it to a safer place.
    """
    created = not os.path.lexists(home / HASHES_FILE)
    if created:
        create_token(home)
    return Tokens.load(home / HASHES_FILE), created


def read_entries(path: Path) -> tuple[Entry, ...]:
    """All entries of the file; InvalidInput says what is wrong with it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidInput(f"the token file {path} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"the token file {path} is not a regular file")
        if status.st_mode & 0o077:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            hint = f"run: chmod 600 {path}"
            raise InvalidInput(
                f"the token file {path} is accessible to other users (mode {mode})",
                hint=hint,
                code="UNSAFE_PERMISSIONS",
            )
        with open(fd, "rb", closefd=False) as file:
            text = file.read().decode("utf-8", "replace")
    finally:
        os.close(fd)
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 3 or not _NAME.fullmatch(parts[0]) or parts[1] not in RANK or not _HASH.fullmatch(parts[2]):
            raise InvalidInput(f"line {number} of {path} is not 'name role sha256'", hint=f"roles: {', '.join(RANK)}")
        entries.append(Entry(Principal(parts[0], parts[1]), bytes.fromhex(parts[2])))  # type: ignore[arg-type]
    return tuple(entries)


def _file_stamp(path: Path) -> tuple[int, int, int, int] | None:
    """Changes whenever the file does."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
