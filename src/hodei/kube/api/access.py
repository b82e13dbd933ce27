"""Who we are and where the API is: a kubeconfig or a pod's service account, read by Kubernetes' own library.

The library is imported when it is needed only: it takes most of a second. It reads files, runs plugins and renews tokens;
this module asks it again when a file has changed, when a plugin's token runs out, or when the API says 401.
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

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_INSTALL = "Install Hodei with its Kubernetes part: pip install 'hodei[kubernetes]'"


class Access(Struct, frozen=True):
    """How to reach an API. All empty: $KUBECONFIG, ~/.kube/config, or the service account of the pod we run in.

    `server` (with `ca_file` and `token_file`) names an API without any kubeconfig.
    """

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    server: str = ""
    ca_file: str = ""
    token_file: str = ""


class Credentials(Struct, frozen=True):
    """What one reading gave."""

    server: str
    namespace: str
    origin: Origin
    prefix: str = ""
    """A path before all paths, where the API is behind a gateway."""
    authorization: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.server!r}, secrets not shown)"


class Source:
    """Reads the credentials of one `Access`, and says when they should be read again."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._loader: Any = None
        self._configuration: Any = None
        self._stamps: dict[str, tuple[int, int, int]] = {}

    async def read(self) -> Credentials:
        """All anew: files are read, plugins are run. Raises InvalidInput."""
        self._loader = None
        access = self._access
        if access.server:
            return self._plain(access)
        files = _kubeconfigs(access)
        if files:
            return await self._from_kubeconfig(files)
        if access.kubeconfig or access.context or not os.environ.get("KUBERNETES_SERVICE_HOST"):
            raise InvalidInput(
                "No access to Kubernetes is configured: there is no kubeconfig"
                + (f" {access.kubeconfig!r}" if access.kubeconfig else " in $KUBECONFIG or ~/.kube/config")
                + ("" if access.kubeconfig else ", and this is not a pod of a cluster"),
                hint="Name a kubeconfig that `kubectl` works with (--kubeconfig FILE), or run as a pod with a service account.",
            )
        return self._in_cluster()

    async def renewed(self) -> Credentials | None:
        """New credentials if something has changed or runs out soon; None means that the old ones hold."""
        if any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
            return await self.read()
        if self._loader is not None and self._expires():
            before = self._secrets()
            try:
                await self._loader.load_and_set(self._configuration)
            except Exception as error:
                raise InvalidInput(f"The credentials cannot be renewed: {error}") from error
            if self._secrets() != before:
                return self._from_configuration(self._configuration, self._namespace())
        return None

    def _secrets(self) -> tuple[object, ...]:
        configuration = self._configuration
        return configuration.api_key.get("BearerToken"), configuration.cert_file, configuration.key_file

    def _expires(self) -> bool:
        return hasattr(self._loader, "exec_plugin_expiry") or self._loader.provider is not None

    # ---------------------------------------------------------------------------------------- a kubeconfig

    async def _from_kubeconfig(self, files: list[str]) -> Credentials:
        config, client = _library()
        self._stamps = {path: _stamp(path) for path in files}
        self._configuration = configuration = type.__call__(client.Configuration)
        try:
            self._loader = loader = await config.load_kube_config(
                config_file=os.pathsep.join(files),
                context=self._access.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
            if _asks_plugin(loader) and not hasattr(loader, "token") and not getattr(loader, "cert_file", None):
                # The library only logs why a plugin failed; asked directly, it says.
                await _library_plugin()(loader._user["exec"]).run()
                raise InvalidInput("the plugin gave neither a token nor a certificate")
        except Exception as error:
            raise InvalidInput(
                f"The kubeconfig {' '.join(files)} cannot be used: {error}",
                hint="Check that `kubectl get --raw /version` works with the same file and context.",
            ) from error
        user = loader._user.value if loader._user is not None else {}
        for key in ("tokenFile", "client-certificate", "client-key"):
            if user.get(key):
                self._watch(str(user[key]), files)
        if loader._cluster.value.get("certificate-authority"):
            self._watch(str(loader._cluster.value["certificate-authority"]), files)
        return self._from_configuration(configuration, self._namespace())

    def _watch(self, path: str, files: list[str]) -> None:
        for base in files:
            full = str(Path(base).parent / Path(path).expanduser())
            if os.path.exists(full):
                self._stamps[full] = _stamp(full)
                return

    def _namespace(self) -> str:
        context: dict[str, Any] = self._loader.current_context.get("context", {})
        return self._access.namespace or str(context.get("namespace") or "default")

    # ---------------------------------------------------------------------------------------- a pod, or plain words

    def _in_cluster(self) -> Credentials:
        config, client = _library()
        configuration = type.__call__(client.Configuration)
        try:
            config.load_incluster_config(configuration, try_refresh_token=False)
            namespace = (_ACCOUNT / "namespace").read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise InvalidInput(
                f"The service account of this pod cannot be used: {error}",
                hint="Let the pod have one (automountServiceAccountToken), or name a kubeconfig.",
            ) from error
        self._stamps = {str(path): _stamp(str(path)) for path in (_ACCOUNT / "token", _ACCOUNT / "ca.crt")}
        return self._from_configuration(configuration, self._access.namespace or namespace)

    def _plain(self, access: Access) -> Credentials:
        token = ""
        try:
            if access.token_file:
                token = Path(access.token_file).read_text().strip()
        except OSError as error:
            raise InvalidInput(f"The token file {access.token_file!r} cannot be read: {error.strerror}") from error
        self._stamps = {path: _stamp(path) for path in (access.token_file, access.ca_file) if path}
        return _credentials(
            access.server.rstrip("/"), access.namespace or "default", f"Bearer {token}" if token else "",
            ca_file=access.ca_file,
        )  # fmt: skip

    def _from_configuration(self, configuration: Any, namespace: str) -> Credentials:
        return _credentials(
            configuration.host,
            namespace,
            # A file's last newline belongs to the file, not to the token.
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
        raise InvalidInput(f"Kubernetes' library is missing: {error}", hint=_INSTALL) from error
    return config, client


def _library_plugin() -> Any:
    from kubernetes.aio.config.exec_provider import ExecProvider

    return ExecProvider


def _asks_plugin(loader: Any) -> bool:
    return loader._user is not None and "exec" in loader._user and loader.provider is None


def _kubeconfigs(access: Access) -> list[str]:
    named = access.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    paths = [str(Path(path).expanduser()) for path in named.split(os.pathsep) if path]
    return [path for path in paths if os.path.isfile(path)]


def _stamp(path: str) -> tuple[int, int, int]:
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
            # Clusters' own authorities are rarely as exact as Python 3.13 asks for by default.
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
