#!/bin/sh
# Helm for the test that compares the chart with the plain manifests, built once from the Go module proxy:
#   build-helm.sh [FOLDER]
# It needs only Go (scripts/install-go.sh fetches one if necessary). The binary appears when it is complete.
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
