#!/bin/sh
# Hodei on a minikube cluster of three nodes: builds the image, creates the cluster, loads the image, installs Hodei and
# applies the example workloads:
#   deploy/minikube.sh             run it again to build a new image and restart Hodei from it
#   deploy/minikube.sh delete      deletes the cluster with everything in it
# Environment: PROFILE (default: hodei), NODES (3), WAIT (300s), EXAMPLES=0 to skip the examples, START for more arguments
# of `minikube start`, for example START='--driver=docker --kubernetes-version=v1.36.4'. Your current kubectl context does
# not change.
set -eu

profile=${PROFILE:-hodei}
nodes=${NODES:-3}
wait=${WAIT:-300s}
deploy=$(cd "$(dirname "$0")" && pwd)

fail() {
    echo "minikube.sh: $1" >&2
    exit 1
}

[ $# -le 1 ] || fail "too many arguments; next: minikube.sh, or minikube.sh delete"
case $profile in
'' | *[!a-z0-9-]* | -* | *-) fail "'$profile' is not a valid profile; next: use lower-case letters, digits and '-'" ;;
esac
case $nodes in
'' | 0* | *[!0-9]*) fail "'$nodes' is not a number of nodes; next: use NODES=3" ;;
esac
command -v minikube >/dev/null || fail "the command minikube is not found; next: https://minikube.sigs.k8s.io/docs/start/"

case ${1:-} in
'') ;;
delete)
    minikube --profile "$profile" delete
    exit 0
    ;;
*) fail "unknown argument '$1'; next: minikube.sh, or minikube.sh delete" ;;
esac

for tool in docker kubectl; do
    command -v "$tool" >/dev/null || fail "the command $tool is not found; next: install it"
done

# The image first: if it cannot be built, no cluster is needed.
docker build --file "$deploy/Dockerfile" --tag hodei:latest "$deploy/.." ||
    fail "the image cannot be built; next: see the error above; 'docker version' shows whether the daemon runs"
# The tag is the id of the image: nodes do not load a tag twice, and a Deployment rolls out only when its tag changes.
id=$(docker image inspect --format '{{.Id}}' hodei:latest)
image=hodei:$(printf %s "${id#sha256:}" | cut -c 1-12)
docker tag hodei:latest "$image"

# START holds several arguments.
# shellcheck disable=SC2086
minikube --profile "$profile" start --nodes "$nodes" --keep-context ${START:-} ||
    fail "the cluster did not start; next: minikube --profile $profile logs; or deploy/minikube.sh delete, then try again"
minikube --profile "$profile" image load "$image" ||
    fail "the image cannot be loaded into the cluster; next: minikube --profile $profile image ls"

# A kubeconfig with this cluster alone, so that nothing below can reach another cluster.
own=$(mktemp)
trap 'rm -f "$own"' EXIT
trap 'exit 130' INT TERM
kubectl --context "$profile" config view --minify --flatten >"$own"
export KUBECONFIG="$own"
kubectl wait --for=condition=Ready nodes --all "--timeout=$wait" ||
    fail "the nodes are not ready after $wait; next: kubectl --context $profile describe nodes"

WAIT=$wait KUBECTL=kubectl sh "$deploy/setup.sh" hodei-system "$image"

if [ "${EXAMPLES:-1}" != 0 ]; then
    examples=$deploy/examples
    kubectl apply -f "$examples/priorityclasses.yaml" -f "$examples/workloads.yaml" -f "$examples/gang-owner.yaml"
    kubectl rollout status deployment/high-priority "--timeout=$wait" ||
        fail "the example is not ready after $wait; next: kubectl --context $profile describe pods"
    kubectl get pods --output wide
fi

cat <<TEXT

Hodei schedules pods with 'schedulerName: hodei' in the minikube cluster '$profile'. On three nodes the gang of workloads.yaml
waits: it needs three nodes besides that of the high-priority pod. Next:
  kubectl --context $profile get pods -o wide -w
  kubectl --context $profile describe pods        (shows why pods wait)
  minikube --profile $profile node add            (then the gang starts)
  deploy/minikube.sh delete                       (deletes the cluster)
TEXT
