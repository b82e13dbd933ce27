#!/bin/sh
# Builds the control plane that the tests and `make bench-kube` run against, once, into a folder outside the repository:
#   build.sh [FOLDER]
# Needs Go (scripts/install-go.sh installs it if necessary) and the module proxy. The first build takes nine minutes on two
# cores and 2 GB of memory. A program appears in the folder only when it is complete.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n "s/^\tk8s\.io\/kubernetes \(v[0-9.]*\).*/\1/p" "$here/go.mod")
minor=$(echo "$version" | cut -d. -f2)
bin=${1:-${HODEI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hodei}/kubernetes-$version}

missing=
for name in kube-apiserver kube-scheduler kube-controller-manager kubectl etcd kwok; do
    [ -x "$bin/$name" ] || missing="$missing $name"
done
[ -n "$missing" ] || exit 0

go=$(sh "$here/../../../scripts/install-go.sh")
mkdir -p "$bin"
part=$(mktemp -d "$bin/part.XXXXXX")
trap 'rm -rf "$part"' EXIT
trap 'exit 130' INT TERM
cd "$here"
export CGO_ENABLED=0 GOTOOLCHAIN=auto GOBIN="$part"
package=k8s.io/component-base/version
names="-X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$minor"
for name in $missing; do
    echo "building $name for Kubernetes $version" >&2
    case $name in
    etcd) "$go" build -trimpath -ldflags '-s -w' -o "$part/etcd" go.etcd.io/etcd/server/v3 ;;
    kwok) "$go" install -trimpath -ldflags '-s -w' sigs.k8s.io/kwok/cmd/kwok@v0.8.0 ;;
    *) "$go" build -trimpath -ldflags "-s -w $names" -o "$part/$name" "k8s.io/kubernetes/cmd/$name" ;;
    esac
    mv "$part/$name" "$bin/$name"
done
