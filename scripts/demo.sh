#!/bin/sh
# A tour of a local server: start, submit, explain, wait, show, stop.
set -eu
bin=${1:?the folder with hodei in it}
here=$(dirname "$0")/..
HODEI_HOME=$(mktemp -d "${TMPDIR:-/tmp}/hodei-demo.XXXXXX")
export HODEI_HOME
# Jobs run in the user's home directory; some containers name one that does not exist.
[ -d "${HOME:-}" ] || export HOME="$HODEI_HOME"
stop() {
    "$bin/hodei" down --timeout 30 >/dev/null 2>&1 || true
    # The agent may still write its last lines; then rm finds a directory that is not empty.
    tries=0
    until rm -rf "$HODEI_HOME" 2>/dev/null || [ $tries -ge 100 ]; do tries=$((tries + 1)); sleep 0.1; done
}
trap stop EXIT INT TERM
bold='' plain=''
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s$ hodei %s%s\n' "$bold" "$*" "$plain"; "$bin/hodei" "$@"; }

echo "==> a server of its own in $HODEI_HOME, with three nodes; it is stopped and removed at the end"

say up --detach --port 0 --config "$here/examples/demo.toml"
say nodes
say run -- python3 -c 'print(6*7)'
say submit "$here/examples/demo.yaml"
say why patient
say wait all --timeout 300
say jobs --all
say logs gang --member 2
say why report
say job show flaky
say down --timeout 30
printf '\nEverything ran to its end. Your turn: . %s/activate && hodei up\n' "$bin"
