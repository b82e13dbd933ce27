"""Certificates of the control plane of a test session: an authority, a server, and one per user."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

_DAYS = "7"
_SERVER = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc\nextendedKeyUsage=serverAuth\n"
_CLIENT = "extendedKeyUsage=clientAuth\n"


def make_certificates(folder: Path, users: Mapping[str, str]) -> None:
    """Files `ca`, `server`, one per entry of `users` (file name: subject), and `sa.key`, which signs tokens."""
    folder.mkdir()
    _key(folder / "ca.key")
    _openssl("req", "-x509", "-new", "-key", folder / "ca.key", "-days", _DAYS, "-subj", "/CN=test-ca", "-out",
             folder / "ca.crt")  # fmt: skip
    _signed(folder, "server", "/CN=kube-apiserver", _SERVER)
    for name, subject in users.items():
        _signed(folder, name, subject, _CLIENT)
    _key(folder / "sa.key")


def _signed(folder: Path, name: str, subject: str, purpose: str) -> None:
    key, request, extensions = folder / f"{name}.key", folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(purpose)
    _key(key)
    _openssl("req", "-new", "-key", key, "-subj", subject, "-out", request)
    _openssl("x509", "-req", "-in", request, "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial",
             "-days", _DAYS, "-extfile", extensions, "-out", folder / f"{name}.crt")  # fmt: skip


def _key(path: Path) -> None:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"openssl {arguments[0]} ended with {done.returncode}: {done.stderr}"
