#!/bin/sh
# Uninstalls what setup.sh installed. Running pods continue:
#   deploy/cleanup.sh [NAMESPACE]        (default: hodei-system)
# The namespace is deleted only if setup.sh created it and nothing else is in it. The examples are not deleted: use
# kubectl delete -f deploy/examples/FILE.
# Environment: KUBECTL (default: kubectl), WAIT (120s).
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
'' | *[!a-z0-9-]* | -* | *-) fail "'$namespace' is not a valid namespace; next: use the one that you passed to setup.sh" ;;
esac
command -v "$kubectl" >/dev/null || fail "the command $kubectl is not found; next: install kubectl, or set KUBECTL to its path"
"$kubectl" version >/dev/null 2>&1 ||
    fail "the cluster does not respond; next: run '$kubectl cluster-info', and check KUBECONFIG and the context"
"$kubectl" get namespace "$namespace" >/dev/null 2>&1 ||
    fail "there is no namespace $namespace; next: use the one that you passed to setup.sh"

# ClusterRoles are not in a namespace: delete them only if they belong to this installation.
holder=$("$kubectl" get clusterrolebinding hodei-scheduler --ignore-not-found \
    --output 'jsonpath={.subjects[0].namespace}')
[ -z "$holder" ] || [ "$holder" = "$namespace" ] ||
    fail "Hodei is installed in namespace $holder, not in $namespace; next: cleanup.sh $holder"

delete() {
    sed "s|namespace: hodei-system|namespace: $namespace|" "$manifests/$1" |
        "$kubectl" delete --ignore-not-found "--timeout=$wait" -f - ||
        fail "the objects of $1 cannot be deleted; next: see the error above, then run this script again"
}

# The Deployment first: a running scheduler must not lose its permissions.
for file in deployment networkpolicy pdb service config; do
    delete "$file.yaml"
done
if "$kubectl" get customresourcedefinition servicemonitors.monitoring.coreos.com >/dev/null 2>&1; then
    delete servicemonitor.yaml
fi
"$kubectl" --namespace "$namespace" wait --for=delete pod "--timeout=$wait" \
    --selector app.kubernetes.io/name=hodei,app.kubernetes.io/component=scheduler ||
    fail "pods of Hodei still exist after $wait; next: $kubectl --namespace $namespace get pods"
"$kubectl" --namespace "$namespace" delete --ignore-not-found lease/hodei configmap/hodei-usage
for file in rbac-forecast rbac-reclaim rbac; do
    delete "$file.yaml"
done

made=$("$kubectl" get namespace "$namespace" --output 'jsonpath={.metadata.annotations.hodei\.io/made-by}')
if [ "$made" != setup.sh ]; then
    echo "namespace $namespace was not created by setup.sh and is kept"
    exit 0
fi
kinds=pods,services,configmaps,secrets,serviceaccounts,persistentvolumeclaims
kinds=$kinds,deployments.apps,daemonsets.apps,statefulsets.apps,jobs.batch,cronjobs.batch
left=$("$kubectl" --namespace "$namespace" get --output name "$kinds" |
    grep -v -x -e configmap/kube-root-ca.crt -e serviceaccount/default || true)
if [ -n "$left" ]; then
    echo "namespace $namespace is kept because it contains other objects:"
    echo "$left" | sed 's/^/  /'
    exit 0
fi
"$kubectl" delete namespace "$namespace" "--timeout=$wait"
