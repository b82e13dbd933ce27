"""Where the server is and which token it takes: argument, then environment, then what `hodei up` left in its home."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hodei.client.errors import ServerUnreachable
from hodei.model.errors import InvalidInput

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServerFile(msgspec.Struct, frozen=True):
    """`server.json`, written by a running server into its home."""

    address: str
    pid: int = 0


class Target(msgspec.Struct, frozen=True):
    """A server to talk to. `path` is a prefix in front of `/api/v1`, empty for a server at the root of its host."""

    scheme: str
    host: str
    port: int
    path: str
    token: str

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def loopback(self) -> bool:
        return self.host in _LOOPBACK


def home_dir(home: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """HODEI_HOME, or ~/.hodei."""
    return Path(home or environ.get("HODEI_HOME") or "~/.hodei").expanduser()


def read_server_file(home: Path) -> ServerFile | None:
    """What the server of `home` says of itself; None if it left nothing readable."""
    try:
        return msgspec.json.decode((home / "server.json").read_bytes(), type=ServerFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def find_server(
    address: str | None = None,
    token: str | None = None,
    home: Path | str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Target:
    """The server to talk to. ServerUnreachable when none is named anywhere."""
    where = home_dir(home, environ)
    named = address or environ.get("HODEI_SERVER", "")
    if not named:
        found = read_server_file(where)
        if found is None:
            raise ServerUnreachable(
                f"no server is running here ({where}/server.json is missing)",
                hint="start one with: hodei up, or set HODEI_SERVER",
            )
        return split_address(found.address, token or _token_of(environ) or _token_in(where / "token"))
    target = split_address(named, token or _token_of(environ))
    if not target.token and target.loopback:
        # The token of this machine's server goes to this machine only, never to a host named by someone else.
        return msgspec.structs.replace(target, token=_token_in(where / "token"))
    return target


def split_address(address: str, token: str = "") -> Target:
    text = address.strip()
    hint = "write it as http://127.0.0.1:8443 or https://hodei.example.com"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
    except ValueError:  # half an IPv6 address
        raise InvalidInput(f"{text[:200]!r} is not the address of a server", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidInput(f"{text[:200]!r} is not the address of a server", hint=hint)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise InvalidInput(f"{text[:200]!r} has no valid port", hint=hint) from None
    if not token.isprintable() or not token.isascii() or " " in token:
        raise InvalidInput("the token holds characters that no token has", hint="is the token file the right one?")
    return Target(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), token)


def _token_of(environ: Mapping[str, str]) -> str:
    if token := environ.get("HODEI_TOKEN", "").strip():
        return token
    if file := environ.get("HODEI_TOKEN_FILE", ""):
        try:
            return Path(file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise InvalidInput(f"cannot read the token file {file}: {reason}", hint="see HODEI_TOKEN_FILE") from None
    return ""


def _token_in(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
