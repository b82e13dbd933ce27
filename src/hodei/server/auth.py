"""Who is calling: bearer tokens, kept as hashes in a file that nobody else can read.

A token is `hod_`, 40 base32 characters (200 random bits) and 7 of checksum, so that secret scanners find it and a
mistyped one is told apart from an unknown one. It is sent in the Authorization header, never in a URL. The file has
one line per token, `name role sha256`, and is read again when it changes: a removed line shuts its holder out within
seconds, open streams included.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol

from msgspec import Struct, structs
from starlette.types import Scope

from hodei.model.audit import AuditEntry
from hodei.model.effects import SaveAudit
from hodei.model.errors import Conflict, HodeiError, InvalidInput, Unavailable
from hodei.server.errors import Forbidden, Malformed, TooFast, Unauthorized
from hodei.server.rate_limits import Rates, place_of
from hodei.server.route import ANYONE, RANK, Policy, Principal, Role, Route

log = logging.getLogger("hodei.server")
PREFIX = "hod_"
PLAIN_FILE = "token"
HASHES_FILE = "tokens"
RELOAD_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LONGEST = 200
_LOGIN_HINT = (
    "send the header 'Authorization: Bearer TOKEN'; the token made at first start is in the file 'token' of the "
    "server's home directory, and the hodei command finds it there or in HODEI_TOKEN"
)


class Entry(Struct, frozen=True):
    who: Principal
    digest: bytes


class Authenticator(Protocol):
    """Who a bearer token belongs to. An extension is called with the server's home and returns its authenticator and
    whether it has just made the first credential."""

    def find(self, token: str) -> Principal | None: ...

    def current(self, who: Principal) -> bool:
        """Whether the credential that `who` came in with still counts."""
        ...

    def role_of(self, name: str) -> Role | None:
        """The role of that user now; None if there is no such user, Unavailable if that is not known."""
        ...


class Tokens:
    """The known tokens. `path` None: only the entries given, never read again."""

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
        self._looked_at = monotonic()
        self._seen = _mark(path) if path else None
        self._trouble = ""

    @classmethod
    def load(cls, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> Tokens:
        """InvalidInput when the file is missing, malformed, or readable by anyone but its owner."""
        return cls(read_entries(path), path=path, monotonic=monotonic)

    def find(self, token: str) -> Principal | None:
        """Compares hashes in constant time, and with every entry, so that timing tells nothing."""
        self._refresh()
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found: Entry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return None if found is None else structs.replace(found.who, token=found.digest)

    def current(self, who: Principal) -> bool:
        """Whether the very token that `who` came in with is still one of that name and role."""
        self._refresh()
        return any(
            entry.digest == who.token and entry.who.name == who.name and entry.who.role == who.role
            for entry in self._entries
        )

    def role_of(self, name: str) -> Role | None:
        """The role that the user has now, the lowest if there are several tokens of that name; None without a token.

        Unavailable while the token file cannot be trusted: that is no reason to say that a user is gone."""
        self._refresh()
        if self._trouble:
            raise Unavailable(f"nobody can tell who has which rights: {self._trouble}", hint="see the server's log")
        return min((entry.who.role for entry in self._entries if entry.who.name == name), key=RANK.get, default=None)  # type: ignore[arg-type]

    def _refresh(self) -> None:
        now = self._monotonic()
        if self._path is None or now - self._looked_at < RELOAD_EVERY_S:
            return
        self._looked_at = now
        seen = _mark(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._entries, self._trouble = read_entries(self._path), ""
        except InvalidInput as error:
            # A file that cannot be trusted lets nobody in: the other way round a revocation could get lost.
            self._entries, self._trouble = (), error.message
            log.error("all tokens are refused until this is put right: %s", error.message)


def admit(policy: Policy, scope: Scope, tokens: Authenticator) -> Principal:
    """The caller, if the policy lets them in; Unauthorized or Forbidden if not."""
    if policy.rank == 0:
        return ANYONE
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) > 1:
        raise Malformed("the Authorization header is given more than once")
    if not given:
        raise _unauthorized("this needs a token", "missing")
    scheme, _, token = given[0].decode("latin-1").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > _LONGEST:
        raise _unauthorized("the Authorization header has no bearer token", "malformed")
    who = tokens.find(token)
    if who is None:
        if token.startswith(PREFIX) and not well_formed(token):
            raise _unauthorized("the token is incomplete or mistyped: its checksum does not fit", "malformed")
        raise _unauthorized("the token is not known here")
    if not policy.allows(who.role):
        needed = next(role for role, rank in RANK.items() if rank == policy.rank)
        refusal = Forbidden(
            f"this needs the role {needed}; {who.name} has the role {who.role}",
            hint="ask an administrator of this server for a token with that role",
        )
        refusal.who = who
        raise refusal
    return who


def _unauthorized(message: str, kind: str = "unknown") -> Unauthorized:
    refusal = Unauthorized(message, hint=_LOGIN_HINT, headers={"www-authenticate": 'Bearer realm="hodei"'})
    refusal.kind = kind
    return refusal


def still_valid(who: Principal, tokens: Authenticator) -> None:
    """Unauthorized if the token that the caller came in with was replaced or taken away meanwhile."""
    if who is not ANYONE and not tokens.current(who):
        raise _unauthorized("the token was replaced or taken away while this went on")


# ------------------------------------------------------------------------------------------ making and keeping tokens


def new_token() -> str:
    body = base64.b32encode(secrets.token_bytes(25)).decode("ascii").lower()
    return PREFIX + body + _checksum(body)


def well_formed(token: str) -> bool:
    body = token.removeprefix(PREFIX)
    return len(body) == 47 and body[40:] == _checksum(body[:40])


def _checksum(body: str) -> str:
    return base64.b32encode(zlib.crc32(body.encode("ascii", "replace")).to_bytes(4, "big")).decode("ascii")[:7].lower()


def create_token(home: Path, *, name: str = "admin", role: Role = "admin") -> str:
    """Make the first token: its hash goes to `home/tokens`, the token itself to `home/token`, both for the owner only.

    Conflict if `home/token` is already there (even as a link); nothing was changed then.
    """
    plain = home / PLAIN_FILE
    if os.path.lexists(plain):
        raise Conflict(f"{plain} already exists", hint="remove it to have a new token made")
    token = add_token(home / HASHES_FILE, name, role)
    # The hash comes first: a crash between the two leaves a server that can be given a new token, not a token
    # that looks right and is refused.
    fd = os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    return token


def add_token(path: Path, name: str, role: Role) -> str:
    """Make a token and keep its hash in the file at `path`; an older token of that name is replaced."""
    if not _NAME.fullmatch(name) or role not in RANK:
        raise InvalidInput(
            f"{name[:80]!r} with the role {role!r} cannot be written to a token file",
            hint=f"letters, digits and ._@- for the name; roles are {', '.join(RANK)}",
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
    """The tokens of this home; makes the first one when there is no token file yet. True if it was made now.

    A missing `home/token` alone is left missing: an administrator may have moved it to a safer place.
    """
    made = not os.path.lexists(home / HASHES_FILE)
    if made:
        create_token(home)
    return Tokens.load(home / HASHES_FILE), made


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Every entry of the file; InvalidInput says what is wrong with it and how to put it right."""
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
                f"the token file {path} is open to others (mode {mode})", hint=hint, code="UNSAFE_PERMISSIONS"
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


def _mark(path: Path) -> tuple[int, int, int, int] | None:
    """Changes whenever the file does."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


# ---------------------------------------------------------------------------------------------- logins
# Calls that were refused for want of a valid token: all are counted, and those that showed a wrong token go on
# record.


VERB = "login.failed"


class FailedLogins:
    """`count` is told the kind of each failure, `record` stores a row."""

    def __init__(
        self,
        count: Callable[[str], None],
        record: Callable[[SaveAudit], Awaitable[None]],
        now_ms: Callable[[], int],
    ) -> None:
        self._count, self._record, self._now_ms = count, record, now_ms
        self._each = Rates(per_s=1 / 60, burst=1)
        self._all = Rates(per_s=1 / 30, burst=30)
        self._left_out = 0
        self._writing: set[asyncio.Task[None]] = set()

    def failed(self, error: Unauthorized, route: Route, scope: Scope) -> None:
        """Does not wait for the row to be stored: a store in trouble must not hold the answer up."""
        self._count(error.kind)
        if error.kind == "missing":
            return
        place = place_of(scope.get("client"))
        try:
            self._each.spend(place)
            self._all.spend("")
        except TooFast:
            self._left_out += 1
            return
        # The route, not the path: a path is the caller's own text, and may hold a secret too.
        target = f"{route.method} {route.path}"
        more, self._left_out = self._left_out, 0
        target += f" (and {more} more before)" if more else ""
        entry = AuditEntry(self._now_ms(), "", "", VERB, target, error.code, remote=place)
        log.warning("a call from %s with a token that is not valid was refused: %s", place or "a socket", target)
        task = asyncio.ensure_future(self._write(entry))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, entry: AuditEntry) -> None:
        try:
            await self._record(SaveAudit(entry))
        except HodeiError as error:
            log.warning("an audit row could not be written (%s): %s", entry.verb, error.message)
