#!/bin/sh
# Installs Hodei as a second scheduler, next to the cluster's own, from the plain manifests, and waits until it is ready:
#   deploy/setup.sh [NAMESPACE] [IMAGE]        (default: hodei-system, hodei:latest)
# Environment: KUBECTL (default: kubectl), WAIT (180s), FORECAST=1 and RECLAIM=1 for the optional permissions.
# Run it again to change the image or to add a permission.
set -eu

namespace=${1:-hodei-system}
image=${2:-hodei:latest}
kubectl=${KUBECTL:-kubectl}
wait=${WAIT:-180s}
manifests=$(cd "$(dirname "$0")/kubernetes" && pwd)

fail() {
    echo "setup.sh: $1" >&2
    exit 1
}

[ $# -le 2 ] || fail "too many arguments; next: setup.sh [NAMESPACE] [IMAGE]"
# Both values are inserted into the manifests, so nothing but a name is accepted.
case $namespace in
'' | *[!a-z0-9-]* | -* | *-) fail "'$namespace' is not a valid namespace; next: use lower-case letters, digits and '-'" ;;
esac
[ ${#namespace} -le 63 ] || fail "'$namespace' is too long for a namespace; next: use at most 63 characters"
case $image in
'' | *[!A-Za-z0-9._:/@-]* | -*) fail "'$image' is not a valid image; next: use NAME:TAG, for example hodei:latest" ;;
esac
command -v "$kubectl" >/dev/null || fail "the command $kubectl is not found; next: install kubectl, or set KUBECTL to its path"
"$kubectl" version >/dev/null 2>&1 ||
    fail "the cluster does not respond; next: run '$kubectl cluster-info', and check KUBECONFIG and the context"

# The manifests spell the namespace and the image in one way only, so two text replacements are enough.
forecast=
[ "${FORECAST:-}" != 1 ] || forecast='s|^\( *\)- --listen=.*|&\
\1- --forecast-annotation|'
apply() {
    sed -e "$forecast" -e "s|namespace: hodei-system|namespace: $namespace|" -e "s|image: hodei:latest|image: $image|" \
        "$manifests/$1" | "$kubectl" apply -f - ||
        fail "$1 cannot be applied; next: see the error above; if a permission is missing, let an administrator run this"
}

if "$kubectl" get namespace "$namespace" >/dev/null 2>&1; then
    echo "namespace $namespace exists and is not changed"
else
    # cleanup.sh deletes only a namespace with this annotation.
    sed "s|name: hodei-system|name: $namespace|" "$manifests/namespace.yaml" | "$kubectl" create -f -
    "$kubectl" annotate namespace "$namespace" hodei.io/made-by=setup.sh >/dev/null
fi

for file in rbac config service pdb networkpolicy deployment; do
    apply "$file.yaml"
done
[ "${FORECAST:-}" != 1 ] || apply rbac-forecast.yaml
[ "${RECLAIM:-}" != 1 ] || apply rbac-reclaim.yaml
if "$kubectl" get customresourcedefinition servicemonitors.monitoring.coreos.com >/dev/null 2>&1; then
    apply servicemonitor.yaml
fi

if ! "$kubectl" --namespace "$namespace" rollout status deployment/hodei "--timeout=$wait"; then
    "$kubectl" --namespace "$namespace" get pods --selector app.kubernetes.io/name=hodei --output wide >&2 || true
    echo "setup.sh: Hodei did not start within $wait; next: look at the pods and the log" >&2
    echo "  $kubectl --namespace $namespace describe pods --selector app.kubernetes.io/name=hodei" >&2
    echo "  $kubectl --namespace $namespace logs deployment/hodei" >&2
    echo "  docs/how-to/kubernetes-troubleshooting.md" >&2
    exit 1
fi

cat <<TEXT

Hodei runs in namespace $namespace. It schedules the pods with 'schedulerName: hodei', and no others.
Next:
  $kubectl apply -f $(dirname "$0")/examples/priorityclasses.yaml -f $(dirname "$0")/examples/workloads.yaml
  $(dirname "$0")/demo-preemption.sh
  $(dirname "$0")/cleanup.sh $namespace        (uninstalls Hodei)
TEXT
