#!/bin/sh
# Shows preemption from beginning to end, with no questions asked: fills the nodes with pods of low priority, adds one
# of high priority, tells who had to go, and cleans up after itself.
#   deploy/demo-preemption.sh [NAMESPACE]        (hodei-demo; it is made, and deleted at the end, if it is not there)
# Environment: KUBECTL (kubectl), WAIT (seconds for each step, 60), KEEP=1 leaves everything as it is at the end.
set -eu

namespace=${1:-hodei-demo}
kubectl=${KUBECTL:-kubectl}
wait=${WAIT:-60}
examples=$(cd "$(dirname "$0")/examples" && pwd)
made= # what was not there before, and goes again
classes=

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

pods_that() { # NAME PHASE: the pods of a Deployment in this phase
    in_namespace get pods --selector "app=$1" --field-selector "status.phase=$2" --output name
}

running() {
    pods_that "$1" Running | wc -l
}

until_running() { # NAME COUNT: bounded, and tells what is wrong if it takes too long
    waited=0
    until [ "$(running "$1")" -ge "$2" ]; do
        if [ "$waited" -ge "$wait" ]; then
            in_namespace get pods --output wide >&2
            in_namespace describe pods --selector "app=$1" | tail -n 20 >&2
            fail "$1: $(running "$1") of $2 pods run after $wait s; next: docs/how-to/kubernetes-troubleshooting.md"
        fi
        sleep 1
        waited=$((waited + 1))
    done
}

clean_up() {
    [ "${KEEP:-}" != 1 ] || return 0
    say "cleaning up (KEEP=1 leaves it)"
    in_namespace delete --ignore-not-found --wait=false deployment preemption-low preemption-high || true
    [ -z "$classes" ] || "$kubectl" delete --ignore-not-found -f "$examples/priorityclasses.yaml" || true
    [ -z "$made" ] || "$kubectl" delete namespace "$namespace" --wait=false || true
}

[ $# -le 1 ] || fail "too many arguments; next: demo-preemption.sh [NAMESPACE]"
case $namespace in
'' | *[!a-z0-9-]* | -* | *-) fail "'$namespace' cannot be a namespace; next: use small letters, digits and '-'" ;;
esac
case $wait in
'' | *[!0-9]*) fail "WAIT is a whole number of seconds, not '$wait'; next: WAIT=60" ;;
esac
command -v "$kubectl" >/dev/null || fail "there is no $kubectl here; next: install kubectl, or name it with KUBECTL=…"

# Nodes that a pod without tolerations may use: Ready, not cordoned, without a taint that keeps pods away.
columns='custom-columns=NAME:.metadata.name,CORDONED:.spec.unschedulable,TAINTS:.spec.taints[*].effect'
columns="$columns,READY:.status.conditions[?(@.type==\"Ready\")].status"
nodes=$("$kubectl" get nodes --no-headers --output "$columns" |
    awk '$2 != "true" && $3 !~ /(^|,)No(Schedule|Execute)/ && $4 == "True" { count++ } END { print count + 0 }')
[ "$nodes" -gt 0 ] || fail "no node can take a pod; next: '$kubectl get nodes' (cordoned, tainted, not ready?)"

trap clean_up EXIT
trap 'exit 130' INT TERM
if ! "$kubectl" get namespace "$namespace" >/dev/null 2>&1; then
    "$kubectl" create namespace "$namespace" >/dev/null
    made=1
fi
"$kubectl" get priorityclass hodei-example-low >/dev/null 2>&1 || classes=1
"$kubectl" apply -f "$examples/priorityclasses.yaml" >/dev/null

say "1. pods of low priority, one on each of $nodes node(s)"
in_namespace apply -f "$examples/preemption-low.yaml"
in_namespace scale deployment preemption-low "--replicas=$nodes"
until_running preemption-low "$nodes"
in_namespace get pods --output wide

say "2. a pod of high priority: there is no node left for it, so one of the others has to go"
in_namespace apply -f "$examples/preemption-high.yaml"
until_running preemption-high 1
in_namespace get pods --output wide

say "3. who had to go, in the words of the cluster's events"
waited=0
until in_namespace get events --field-selector reason=Preempted --output name | grep -q .; do
    [ "$waited" -lt "$wait" ] || fail "no pod was preempted: there was room for all; next: were nodes added meanwhile?"
    sleep 1
    waited=$((waited + 1))
done
in_namespace get events --field-selector reason=Preempted

say "4. its Deployment made it anew, and it waits for room"
waited=0
until [ "$(pods_that preemption-low Pending | wc -l)" -ge 1 ]; do
    [ "$waited" -lt "$wait" ] || fail "no pod waits after $wait s; next: '$kubectl --namespace $namespace get pods'"
    sleep 1
    waited=$((waited + 1))
done
in_namespace get pods --selector app=preemption-low --field-selector status.phase=Pending
in_namespace get events --field-selector reason=FailedScheduling | tail -n 3
