#!/bin/sh
# Installs Chromium and its driver for the browser tests. Needs root and apt-get.
set -eu
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium is missing, and installing it needs root; next: sudo apt-get install chromium chromium-driver" >&2
    exit 0 # the tests decide whether it is required
fi
echo "installing chromium" >&2
export DEBIAN_FRONTEND=noninteractive
{ apt-get install -y -qq chromium chromium-driver ||
    { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }; } >/dev/null 2>&1 ||
    echo "apt-get failed to install chromium; next: run it by hand to see its error" >&2
