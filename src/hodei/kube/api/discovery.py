"""What an API serves: the versions of a group, for groups whose version changes from release to release."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from hodei.kube.api.client import Api, ApiError


class _Version(Struct):
    version: str = ""


class _Group(Struct):
    versions: tuple[_Version, ...] = ()
    preferred: _Version = msgspec.field(default_factory=_Version, name="preferredVersion")


class _Kind(Struct):
    name: str = ""
    kind: str = ""


class _Kinds(Struct):
    resources: tuple[_Kind, ...] = ()


async def served_versions(api: Api, group: str) -> list[str]:
    """The versions of a group such as `scheduling.k8s.io`, the API's preferred one first; none if it has no such group."""
    try:
        found = msgspec.json.decode(await api.request("GET", f"/apis/{group}"), type=_Group)
    except ApiError as error:
        if error.status == 404:
            return []
        raise
    names = [one.version for one in found.versions]
    first = found.preferred.version
    return [first, *(name for name in names if name != first)] if first else names


async def served_resources(api: Api, group: str, version: str) -> dict[str, str]:
    """What one version holds, as `podgroups` to `PodGroup` (also `podgroups/status`); empty if it is not served."""
    path = f"/apis/{group}/{version}" if group else f"/api/{version}"
    try:
        found = msgspec.json.decode(await api.request("GET", path), type=_Kinds)
    except ApiError as error:
        if error.status == 404:
            return {}
        raise
    return {one.name: one.kind for one in found.resources}


async def served_path(api: Api, group: str, resource: str) -> str:
    """The path of a group's collection in the first version that holds it, or "" if none does."""
    for version in await served_versions(api, group):
        if resource in await served_resources(api, group, version):
            return f"/apis/{group}/{version}/{resource}"
    return ""


class _Release(Struct):
    minor: str = ""


async def served_minor(api: Api) -> int:
    """The 36 of Kubernetes 1.36; 0 if the API does not say."""
    try:
        said = msgspec.json.decode(await api.request("GET", "/version"), type=_Release).minor
    except (ApiError, msgspec.DecodeError):
        return 0
    digits = said.rstrip("+")  # as some vendors write it
    return int(digits) if digits.isdigit() else 0
