"""A way to a server through an HTTP proxy, as `proxy-url` of a kubeconfig or $HTTPS_PROXY asks for."""

from __future__ import annotations

import asyncio
import base64
import socket
from urllib.parse import unquote, urlsplit


async def tunnel(loop: asyncio.AbstractEventLoop, through: str, host: str, port: int) -> socket.socket:
    """A socket to the server by a proxy's CONNECT. Raises OSError."""
    proxy = urlsplit(through)
    if proxy.scheme != "http" or not proxy.hostname:
        raise ConnectionError(
            f"a proxy must be given as http://HOST:PORT, and this one has the scheme {proxy.scheme!r}"
        )
    found = await loop.getaddrinfo(proxy.hostname, proxy.port or 80, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        ask = f"CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n"
        if proxy.username:
            pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
            ask += f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
        await loop.sock_sendall(sock, f"{ask}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < 65536:
            got = await loop.sock_recv(sock, 1)  # not a byte more: what follows belongs to TLS
            if not got:
                break
            answer += got
        status = answer.split(b"\r\n", 1)[0].decode("latin-1")
        if " 200" not in status:
            raise ConnectionError(f"the proxy {proxy.hostname} answered {status or 'nothing'!r}")
        return sock
    except BaseException:
        sock.close()
        raise
