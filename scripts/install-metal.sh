#!/bin/sh
# Installs what the bare-metal tests need: ipmi_sim and ipmitool (apt-get, as root), and a Redfish emulator in a venv of its
# own in the cache folder. Starts nothing.
set -eu
version=2.2.0
folder=${HODEI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hodei}/sushy-tools-$version
if ! command -v ipmi_sim >/dev/null || ! command -v ipmitool >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "ipmi_sim or ipmitool is missing, and installing them needs root; next: sudo apt-get install openipmi ipmitool" >&2
    else
        echo "installing ipmi_sim" >&2
        export DEBIAN_FRONTEND=noninteractive
        install() { apt-get install -y -qq --no-install-recommends openipmi ipmitool; }
        { install || { apt-get update -qq && install; }; } >/dev/null 2>&1 ||
            echo "apt-get failed to install openipmi; next: run it by hand to see its error" >&2
    fi
fi
[ ! -e "$folder/ready" ] || exit 0
mkdir -p "$(dirname "$folder")"
sh "$(dirname "$0")/make-venv.sh" "${PYTHON:-python3}" "$folder"
echo "installing sushy-tools into $folder" >&2
if "$folder/bin/python" -m pip install -q --disable-pip-version-check "sushy-tools==$version"; then
    touch "$folder/ready"
else
    echo "pip failed to install sushy-tools; next: run make metal again" >&2 # the tests decide whether it is required
fi
