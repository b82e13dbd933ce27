#!/bin/sh
# Hodei on a minikube cluster of three nodes: builds the image, makes the cluster, loads the image into it, installs Hodei
# and applies the example workloads:
#   deploy/minikube.sh             can be run again: builds anew, and Hodei is started from the new image
#   deploy/minikube.sh delete      takes the cluster away, with all that is in it
# Environment: PROFILE (hodei), NODES (3), EXAMPLES=0 for none, WAIT (300s); START for more arguments of `minikube start`,
# such as START='--driver=docker --kubernetes-version=v1.36.4'. Your current kubectl context stays as it is.
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
'' | *[!a-z0-9-]* | -* | *-) fail "'$profile' cannot be a profile; next: use small letters, digits and '-'" ;;
esac
case $nodes in
'' | 0* | *[!0-9]*) fail "'$nodes' is not a number of nodes; next: use NODES=3" ;;
esac
command -v minikube >/dev/null || fail "there is no minikube here; next: https://minikube.sigs.k8s.io/docs/start/"

case ${1:-} in
'') ;;
delete)
    minikube --profile "$profile" delete
    exit 0
    ;;
*) fail "'$1' is not known; next: minikube.sh, or minikube.sh delete" ;;
esac

for tool in docker kubectl; do
    command -v "$tool" >/dev/null || fail "there is no $tool here; next: install it"
done

# The image first: if it cannot be built, no cluster is made for nothing.
docker build --file "$deploy/Dockerfile" --tag hodei:latest "$deploy/.." ||
    fail "the image cannot be built; next: is the Docker daemon running? 'docker version' tells"
# Named by what is in it: nodes keep an image that they have by its name, and a Deployment is changed by a new name only.
id=$(docker image inspect --format '{{.Id}}' hodei:latest)
image=hodei:$(printf %s "${id#sha256:}" | cut -c 1-12)
docker tag hodei:latest "$image"

# START is a list of words.
# shellcheck disable=SC2086
minikube --profile "$profile" start --nodes "$nodes" --keep-context ${START:-} ||
    fail "the cluster did not start; next: 'minikube --profile $profile logs', or deploy/minikube.sh delete and again"
minikube --profile "$profile" image load "$image" ||
    fail "the image cannot be loaded into the cluster; next: 'minikube --profile $profile image ls'"

# A kubeconfig with this cluster alone: whatever happens below happens there and nowhere else.
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
        fail "the example does not run after $wait; next: kubectl --context $profile describe pods"
    kubectl get pods --output wide
fi

cat <<TEXT

Hodei schedules pods with 'schedulerName: hodei' in the minikube cluster '$profile'. On three nodes the gang of workloads.yaml
waits: it wants three beside the pod of high priority. Next:
  kubectl --context $profile get pods -o wide -w
  kubectl --context $profile describe pods        (why they wait)
  minikube --profile $profile node add            (the gang starts)
  deploy/minikube.sh delete                       (takes the cluster away)
TEXT
