#!/bin/sh
# Installs Hodei as a scheduler beside the cluster's own, from the plain manifests, and waits until it runs:
#   deploy/setup.sh [NAMESPACE] [IMAGE]        (hodei-system, hodei:latest)
# Environment: KUBECTL (kubectl), WAIT (180s), FORECAST=1 and RECLAIM=1 for the optional rights.
# It can be run again: to change the image, to take on a right.
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
# These go into the manifests: nothing but a name may.
case $namespace in
'' | *[!a-z0-9-]* | -* | *-) fail "'$namespace' cannot be a namespace; next: use small letters, digits and '-'" ;;
esac
[ ${#namespace} -le 63 ] || fail "'$namespace' is too long for a namespace; next: use 63 characters at most"
case $image in
'' | *[!A-Za-z0-9._:/@-]* | -*) fail "'$image' cannot be an image; next: use NAME:TAG, as in hodei:latest" ;;
esac
command -v "$kubectl" >/dev/null || fail "there is no $kubectl here; next: install kubectl, or name it with KUBECTL=…"
"$kubectl" version >/dev/null 2>&1 ||
    fail "the cluster cannot be reached; next: '$kubectl cluster-info' tells why (KUBECONFIG, context)"

# The manifests name the namespace and the image once each in one way, so that two plain replacements will do.
forecast=
[ "${FORECAST:-}" != 1 ] || forecast='s|^\( *\)- --listen=.*|&\
\1- --forecast-annotation|'
apply() {
    sed -e "$forecast" -e "s|namespace: hodei-system|namespace: $namespace|" -e "s|image: hodei:latest|image: $image|" \
        "$manifests/$1" | "$kubectl" apply -f -
}

if "$kubectl" get namespace "$namespace" >/dev/null 2>&1; then
    echo "namespace $namespace is there already and is left as it is"
else
    # The mark tells cleanup.sh that the namespace is ours to delete.
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
    echo "setup.sh: Hodei did not start within $wait; next:" >&2
    echo "  $kubectl --namespace $namespace describe pods --selector app.kubernetes.io/name=hodei" >&2
    echo "  $kubectl --namespace $namespace logs deployment/hodei" >&2
    echo "  docs/how-to/kubernetes-troubleshooting.md" >&2
    exit 1
fi

cat <<TEXT

Hodei runs in namespace $namespace. A pod with 'schedulerName: hodei' is placed by it; all others are as before.
Next:
  $kubectl apply -f $(dirname "$0")/examples/priorityclasses.yaml -f $(dirname "$0")/examples/workloads.yaml
  $(dirname "$0")/demo-preemption.sh
  $(dirname "$0")/cleanup.sh $namespace        (takes it away again)
TEXT
