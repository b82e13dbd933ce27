#!/bin/sh
# Builds Helm once, from the Go module proxy, for the test that compares the chart with the plain manifests:
#   build-helm.sh [FOLDER]
# It needs only Go, which scripts/install-go.sh downloads if it is missing. An interrupted build leaves no binary.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
version=v3.22.0
bin=${1:-${HODEI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hodei}/helm-$version}
[ ! -x "$bin/helm" ] || exit 0

go=$(sh "$here/install-go.sh")
mkdir -p "$bin"
part=$(mktemp -d "$bin/part.XXXXXX")
trap 'rm -rf "$part"' EXIT
trap 'exit 130' INT TERM
echo "building helm $version" >&2
CGO_ENABLED=0 GOTOOLCHAIN=auto GOBIN=$part "$go" install -trimpath -ldflags '-s -w' "helm.sh/helm/v3/cmd/helm@$version"
mv "$part/helm" "$bin/helm"
