"""Address and credentials of a Kubernetes API: a kubeconfig or a pod's service account, read by the official client library.

The library is imported only when needed, because that takes most of a second. It reads files, runs plugins and renews tokens.
It is called again when a file has changed, when a plugin's token expires, or when the API answers 401.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from hodei.http_client import Origin
from hodei.model.errors import InvalidInput

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_INSTALL = "Install it with: pip install 'hodei[kubernetes]'"


class Access(Struct, frozen=True):
    """How to reach an API. All empty: $KUBECONFIG, ~/.kube/config, or the pod's service account.

    `server` (with `ca_file` and `token_file`) names an API without a kubeconfig.
    """

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    server: str = ""
    ca_file: str = ""
    token_file: str = ""


class Credentials(Struct, frozen=True):
    server: str
    namespace: str
    origin: Origin
    prefix: str = ""
    """A path prefix, for an API behind a gateway."""
    authorization: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.server!r}, secrets not shown)"


class CredentialSource:
    """Reads the credentials of an `Access`, and renews them."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._loader: Any = None
        self._configuration: Any = None
        self._stamps: dict[str, tuple[int, int, int]] = {}

    async def read(self) -> Credentials:
        """Read all files and run plugins. Raises InvalidInput."""
        self._loader = None
        access = self._access
        if access.server:
            return self._from_server_address(access)
        files = _kubeconfigs(access)
        if files:
            return await self._from_kubeconfig(files)
        if access.kubeconfig or access.context or not os.environ.get("KUBERNETES_SERVICE_HOST"):
            raise InvalidInput(
                "No access to Kubernetes is configured: no kubeconfig"
                + (f" {access.kubeconfig!r} exists" if access.kubeconfig else " in $KUBECONFIG or ~/.kube/config")
                + ("" if access.kubeconfig else ", and this process does not run in a pod"),
                hint="Name a kubeconfig that `kubectl` works with (--kubeconfig FILE), or run as a pod with a service account.",
            )
        return self._in_cluster()

    async def renew(self) -> Credentials | None:
        """New credentials if a file has changed or a token expires; None if the old ones are still valid."""
        if any(_file_stamp(path) != stamp for path, stamp in self._stamps.items()):
            return await self.read()
        loader = self._loader
        if loader is not None and (hasattr(loader, "exec_plugin_expiry") or loader.provider is not None):
            before = self._secret_values()
            try:
                await self._loader.load_and_set(self._configuration)
            except Exception as error:
                raise InvalidInput(f"The credentials cannot be renewed: {error}") from error
            if self._secret_values() != before:
                return self._from_configuration(self._configuration, self._namespace())
        return None

    def _secret_values(self) -> tuple[object, ...]:
        configuration = self._configuration
        return configuration.api_key.get("BearerToken"), configuration.cert_file, configuration.key_file

    async def _from_kubeconfig(self, files: list[str]) -> Credentials:
        config, client = _library()
        self._stamps = {path: _file_stamp(path) for path in files}
        self._configuration = configuration = type.__call__(client.Configuration)
        try:
            self._loader = loader = await config.load_kube_config(
                config_file=os.pathsep.join(files),
                context=self._access.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
            if _uses_exec_plugin(loader) and not hasattr(loader, "token") and not getattr(loader, "cert_file", None):
                # The library only logs why a plugin failed; a direct call raises it.
                await _exec_provider()(loader._user["exec"]).run()
                raise InvalidInput("the plugin returned neither a token nor a certificate")
        except Exception as error:
            raise InvalidInput(
                f"The kubeconfig {' '.join(files)} cannot be used: {error}",
                hint="Check that `kubectl get --raw /version` works with the same file and context.",
            ) from error
        user = loader._user.value if loader._user is not None else {}
        for key in ("tokenFile", "client-certificate", "client-key"):
            if user.get(key):
                self._track_file(str(user[key]), files)
        if loader._cluster.value.get("certificate-authority"):
            self._track_file(str(loader._cluster.value["certificate-authority"]), files)
        return self._from_configuration(configuration, self._namespace())

    def _track_file(self, path: str, files: list[str]) -> None:
        for base in files:
            full = str(Path(base).parent / Path(path).expanduser())
            if os.path.exists(full):
                self._stamps[full] = _file_stamp(full)
                return

    def _namespace(self) -> str:
        context: dict[str, Any] = self._loader.current_context.get("context", {})
        return self._access.namespace or str(context.get("namespace") or "default")

    def _in_cluster(self) -> Credentials:
        config, client = _library()
        configuration = type.__call__(client.Configuration)
        try:
            config.load_incluster_config(configuration, try_refresh_token=False)
            namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise InvalidInput(
                f"The service account of this pod cannot be used: {error}",
                hint="Set automountServiceAccountToken for the pod, or name a kubeconfig.",
            ) from error
        self._stamps = {
            str(path): _file_stamp(str(path)) for path in (_SERVICE_ACCOUNT / "token", _SERVICE_ACCOUNT / "ca.crt")
        }
        return self._from_configuration(configuration, self._access.namespace or namespace)

    def _from_server_address(self, access: Access) -> Credentials:
        token = ""
        try:
            if access.token_file:
                token = Path(access.token_file).read_text().strip()
        except OSError as error:
            raise InvalidInput(f"The token file {access.token_file!r} cannot be read: {error.strerror}") from error
        self._stamps = {path: _file_stamp(path) for path in (access.token_file, access.ca_file) if path}
        return _credentials(
            access.server.rstrip("/"), access.namespace or "default", f"Bearer {token}" if token else "",
            ca_file=access.ca_file,
        )  # fmt: skip

    def _from_configuration(self, configuration: Any, namespace: str) -> Credentials:
        return _credentials(
            configuration.host,
            namespace,
            # Without the file's last newline.
            str(configuration.api_key.get("BearerToken") or "").strip(),
            ca_file=configuration.ssl_ca_cert or "",
            certificate=configuration.cert_file or "",
            key=configuration.key_file or "",
            verify=configuration.verify_ssl is not False,
            server_name=configuration.tls_server_name or "",
            proxy=configuration.proxy or "",
        )


def _library() -> tuple[Any, Any]:
    try:
        from kubernetes.aio import client, config
    except ImportError as error:
        raise InvalidInput(f"The Kubernetes client library is not installed: {error}", hint=_INSTALL) from error
    return config, client


def _exec_provider() -> Any:
    from kubernetes.aio.config.exec_provider import ExecProvider

    return ExecProvider


def _uses_exec_plugin(loader: Any) -> bool:
    return loader._user is not None and "exec" in loader._user and loader.provider is None


def _kubeconfigs(access: Access) -> list[str]:
    named = access.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    paths = [str(Path(path).expanduser()) for path in named.split(os.pathsep) if path]
    return [path for path in paths if os.path.isfile(path)]


def _file_stamp(path: str) -> tuple[int, int, int]:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_ino, found.st_size
    return 0, 0, 0


def _credentials(
    server: str, namespace: str, authorization: str, *, ca_file: str = "", certificate: str = "", key: str = "",
    verify: bool = True, server_name: str = "", proxy: str = "",
) -> Credentials:  # fmt: skip
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(f"The address of the Kubernetes API {server!r} is not an http(s) address.")
    tls = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=ca_file or None)
            # Certificates of clusters often fail the strict checks that are the default since Python 3.13.
            tls.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", ssl.VerifyFlags(0))
            tls.set_alpn_protocols(["http/1.1"])
            if not verify:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
            if certificate:
                tls.load_cert_chain(certificate, key or None)
        except OSError as error:
            raise InvalidInput(f"The certificates for {server} cannot be used: {error}") from error
    if not proxy and not urllib.request.proxy_bypass(parts.hostname):
        proxy = urllib.request.getproxies().get(parts.scheme, "")
    return Credentials(
        server=server,
        namespace=namespace,
        origin=Origin(
            parts.hostname, parts.port or (443 if tls is not None else 80), tls, server_name=server_name, proxy=proxy
        ),
        prefix=parts.path.rstrip("/"),
        authorization=authorization,
    )
