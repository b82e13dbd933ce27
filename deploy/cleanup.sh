#!/bin/sh
# Takes away what setup.sh installed; your pods go on where they run:
#   deploy/cleanup.sh [NAMESPACE]        (hodei-system)
# The namespace goes only if setup.sh made it and nobody else uses it. Examples: kubectl delete -f deploy/examples/…
# Environment: KUBECTL (kubectl), WAIT (120s).
set -eu

namespace=${1:-hodei-system}
kubectl=${KUBECTL:-kubectl}
wait=${WAIT:-120s}
manifests=$(cd "$(dirname "$0")/kubernetes" && pwd)

fail() {
    echo "cleanup.sh: $1" >&2
    exit 1
}

[ $# -le 1 ] || fail "too many arguments; next: cleanup.sh [NAMESPACE]"
case $namespace in
'' | *[!a-z0-9-]* | -* | *-) fail "'$namespace' cannot be a namespace; next: name the one given to setup.sh" ;;
esac
command -v "$kubectl" >/dev/null || fail "there is no $kubectl here; next: install kubectl, or name it with KUBECTL=…"
"$kubectl" version >/dev/null 2>&1 ||
    fail "the cluster cannot be reached; next: '$kubectl cluster-info' tells why (KUBECONFIG, context)"
"$kubectl" get namespace "$namespace" >/dev/null 2>&1 ||
    fail "there is no namespace $namespace; next: name the one given to setup.sh"

# The rights are the cluster's, not the namespace's: they go only if they are those of this installation.
holder=$("$kubectl" get clusterrolebinding hodei-scheduler --ignore-not-found \
    --output 'jsonpath={.subjects[0].namespace}')
[ -z "$holder" ] || [ "$holder" = "$namespace" ] ||
    fail "Hodei is installed in namespace $holder, not in $namespace; next: cleanup.sh $holder"

delete() {
    sed "s|namespace: hodei-system|namespace: $namespace|" "$manifests/$1" |
        "$kubectl" delete --ignore-not-found "--timeout=$wait" -f -
}

# The Deployment first: a scheduler that still runs must not lose its rights under way.
for file in deployment networkpolicy pdb service config; do
    delete "$file.yaml"
done
if "$kubectl" get customresourcedefinition servicemonitors.monitoring.coreos.com >/dev/null 2>&1; then
    delete servicemonitor.yaml
fi
"$kubectl" --namespace "$namespace" wait --for=delete pod "--timeout=$wait" \
    --selector app.kubernetes.io/name=hodei,app.kubernetes.io/component=scheduler ||
    fail "pods of Hodei are still there after $wait; next: $kubectl --namespace $namespace get pods"
"$kubectl" --namespace "$namespace" delete --ignore-not-found lease/hodei configmap/hodei-usage
for file in rbac-forecast rbac-reclaim rbac; do
    delete "$file.yaml"
done

made=$("$kubectl" get namespace "$namespace" --output 'jsonpath={.metadata.annotations.hodei\.io/made-by}')
if [ "$made" != setup.sh ]; then
    echo "namespace $namespace was not made by setup.sh and is left as it is"
    exit 0
fi
kinds=pods,services,configmaps,secrets,serviceaccounts,persistentvolumeclaims
kinds=$kinds,deployments.apps,daemonsets.apps,statefulsets.apps,jobs.batch,cronjobs.batch
left=$("$kubectl" --namespace "$namespace" get --output name "$kinds" |
    grep -v -x -e configmap/kube-root-ca.crt -e serviceaccount/default || true)
if [ -n "$left" ]; then
    echo "namespace $namespace is left as it is, others use it:"
    echo "$left" | sed 's/^/  /'
    exit 0
fi
"$kubectl" delete namespace "$namespace" "--timeout=$wait"
