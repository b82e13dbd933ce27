#!/bin/sh
# Demonstrates preemption without asking for input: fills the nodes with low-priority pods, adds a high-priority pod, shows
# which pod was preempted, and cleans up.
#   deploy/demo-preemption.sh [NAMESPACE]        (default: hodei-demo; created if missing, and then deleted at the end)
# Environment: KUBECTL (default: kubectl), WAIT (60, seconds for each step), KEEP=1 to skip the clean-up.
set -eu

namespace=${1:-hodei-demo}
kubectl=${KUBECTL:-kubectl}
wait=${WAIT:-60}
examples=$(cd "$(dirname "$0")/examples" && pwd)
created_namespace= # set if this script created it, and so deletes it
created_classes=

fail() {
    echo "demo-preemption.sh: $1" >&2
    exit 1
}

say() {
    printf '\n== %s\n' "$1"
}

in_namespace() {
    "$kubectl" --namespace "$namespace" "$@"
}

pods_in_phase() { # NAME PHASE: the pods of a Deployment in this phase
    in_namespace get pods --selector "app=$1" --field-selector "status.phase=$2" --output name
}

running() {
    pods_in_phase "$1" Running | wc -l
}

until_running() { # NAME COUNT: fails with a description of the pods after WAIT seconds
    waited=0
    until [ "$(running "$1")" -ge "$2" ]; do
        if [ "$waited" -ge "$wait" ]; then
            in_namespace get pods --output wide >&2
            in_namespace describe pods --selector "app=$1" | tail -n 20 >&2
            fail "$1: only $(running "$1") of $2 pods run after $wait s; next: docs/how-to/kubernetes-troubleshooting.md"
        fi
        sleep 1
        waited=$((waited + 1))
    done
}

clean_up() {
    [ "${KEEP:-}" != 1 ] || return 0
    say "cleaning up (KEEP=1 skips this)"
    in_namespace delete --ignore-not-found --wait=false deployment preemption-low preemption-high || true
    [ -z "$created_classes" ] || "$kubectl" delete --ignore-not-found -f "$examples/priorityclasses.yaml" || true
    [ -z "$created_namespace" ] || "$kubectl" delete namespace "$namespace" --wait=false || true
}

[ $# -le 1 ] || fail "too many arguments; next: demo-preemption.sh [NAMESPACE]"
case $namespace in
'' | *[!a-z0-9-]* | -* | *-) fail "'$namespace' is not a valid namespace; next: use lower-case letters, digits and '-'" ;;
esac
case $wait in
'' | *[!0-9]*) fail "WAIT must be a whole number of seconds, not '$wait'; next: use WAIT=60" ;;
esac
command -v "$kubectl" >/dev/null || fail "the command $kubectl is not found; next: install kubectl, or set KUBECTL to its path"

# Nodes that a pod without tolerations can use: ready, not cordoned, without a NoSchedule or NoExecute taint.
columns='custom-columns=NAME:.metadata.name,CORDONED:.spec.unschedulable,TAINTS:.spec.taints[*].effect'
columns="$columns,READY:.status.conditions[?(@.type==\"Ready\")].status"
nodes=$("$kubectl" get nodes --no-headers --output "$columns" |
    awk '$2 != "true" && $3 !~ /(^|,)No(Schedule|Execute)/ && $4 == "True" { count++ } END { print count + 0 }')
[ "$nodes" -gt 0 ] || fail "no node accepts pods; next: run '$kubectl get nodes': are they cordoned, tainted or not ready?"

trap clean_up EXIT
trap 'exit 130' INT TERM
if ! "$kubectl" get namespace "$namespace" >/dev/null 2>&1; then
    "$kubectl" create namespace "$namespace" >/dev/null
    created_namespace=1
fi
"$kubectl" get priorityclass hodei-example-low >/dev/null 2>&1 || created_classes=1
"$kubectl" apply -f "$examples/priorityclasses.yaml" >/dev/null

say "1. low-priority pods, one on each of $nodes node(s)"
in_namespace apply -f "$examples/preemption-low.yaml"
in_namespace scale deployment preemption-low "--replicas=$nodes"
until_running preemption-low "$nodes"
in_namespace get pods --output wide

say "2. a high-priority pod: no node is free, so one of the others is preempted"
in_namespace apply -f "$examples/preemption-high.yaml"
until_running preemption-high 1
in_namespace get pods --output wide

say "3. the preempted pod, by the events of the cluster"
waited=0
until in_namespace get events --field-selector reason=Preempted --output name | grep -q .; do
    [ "$waited" -lt "$wait" ] || fail "no pod was preempted, because all of them fit; next: check whether a node joined meanwhile"
    sleep 1
    waited=$((waited + 1))
done
in_namespace get events --field-selector reason=Preempted

say "4. its Deployment created it again, and it waits for capacity"
waited=0
until [ "$(pods_in_phase preemption-low Pending | wc -l)" -ge 1 ]; do
    [ "$waited" -lt "$wait" ] || fail "no pod is pending after $wait s; next: $kubectl --namespace $namespace get pods"
    sleep 1
    waited=$((waited + 1))
done
in_namespace get pods --selector app=preemption-low --field-selector status.phase=Pending
in_namespace get events --field-selector reason=FailedScheduling | tail -n 3
