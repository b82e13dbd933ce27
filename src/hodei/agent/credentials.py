"""What a joined agent keeps about its server: address, node name and credential, in one file that only its owner can read."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

ENROLMENT_PREFIX = "hode_"
CREDENTIAL_PREFIX = "hodn_"
JOINED_FILE = "joined.json"
_BODY = re.compile(r"[a-z2-7]{47}")


class NotJoined(Exception):
    """The file is missing or damaged; the message says which."""


def new_secret(prefix: str) -> str:
    """200 random bits and a checksum, so that secret scanners find it and a mistyped one is recognized."""
    body = base64.b32encode(secrets.token_bytes(25)).decode("ascii").lower()
    return prefix + body + _checksum(body)


def is_well_formed(secret: str, prefix: str) -> bool:
    body = secret.removeprefix(prefix)
    return secret.startswith(prefix) and bool(_BODY.fullmatch(body)) and body[40:] == _checksum(body[:40])


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _checksum(body: str) -> str:
    return base64.b32encode(zlib.crc32(body.encode("ascii", "replace")).to_bytes(4, "big")).decode("ascii")[:7].lower()


@dataclass
class Joined:
    """`instance`: random name of this home. `next`: a new credential that the server may not know yet."""

    url: str
    node: str
    backend: str
    credential: str
    instance: str
    next: str = ""
    ca: str = ""
    insecure: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[str] = field(default_factory=list)
    offline_ok_ms: int = 0

    def save(self, home: str, name: str = JOINED_FILE) -> None:
        """Durable on return."""
        write_private(f"{home}/{name}", json.dumps(asdict(self), indent=1))


def load_joined(home: str, name: str = JOINED_FILE) -> Joined:
    path = f"{home}/{name}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
        known = {name: found[name] for name in Joined.__dataclass_fields__ if name in found}
        return Joined(**known)
    except FileNotFoundError:
        raise NotJoined(f"{home} has not joined a server yet") from None
    except (OSError, ValueError, TypeError) as error:
        raise NotJoined(f"{path} cannot be read: {error}") from None


def write_private(path: str, text: str) -> None:
    """Replaces the file at once, durably, readable by its owner only."""
    fresh = f"{path}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(fresh, path)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
