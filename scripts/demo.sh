#!/bin/sh
# The main job of Hodei on the embedded default, to the end: start, submit, explain, wait, show, stop.
set -eu
bin=${1:?the folder with hodei in it}
here=$(dirname "$0")/..
HODEI_HOME=$(mktemp -d "${TMPDIR:-/tmp}/hodei-demo.XXXXXX")
export HODEI_HOME
stop() {
    "$bin/hodei" down --timeout 30 >/dev/null 2>&1 || true
    rm -rf "$HODEI_HOME"
}
trap stop EXIT INT TERM
say() { printf '\n\033[1m$ hodei %s\033[0m\n' "$*"; "$bin/hodei" "$@"; }

say up --detach --port 0 --config "$here/examples/demo.toml"
say nodes
say run -- python3 -c 'print(6*7)'
say submit "$here/examples/demo.yaml"
say why patient
say wait all --timeout 90
say jobs --all
say logs gang --member 2
say why report
say job show flaky
printf '\nEverything ran to its end. Your turn: . %s/activate && hodei up\n' "$bin"
