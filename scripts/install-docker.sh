#!/bin/sh
# Installs what the container tests need: Docker's daemon, a busybox to build an image from, and sshd. Needs root and
# apt-get. Starts nothing.
set -eu
if command -v dockerd >/dev/null && command -v containerd >/dev/null && command -v docker-init >/dev/null &&
    [ -x /bin/busybox ] && [ -x /usr/sbin/sshd ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "dockerd, tini, busybox or sshd is missing, and installing them needs root; next:" \
        "sudo apt-get install docker.io tini busybox-static openssh-server" >&2
    exit 0 # the tests decide whether it is required
fi
echo "installing docker" >&2
export DEBIAN_FRONTEND=noninteractive
# The daemon of the package must not start: the tests start their own.
made=
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d && made=yes
fi
install() { apt-get install -y -qq --no-install-recommends docker.io containerd runc tini busybox-static openssh-server; }
{ install || { apt-get update -qq && install; }; } >/dev/null 2>&1 || echo "apt-get failed to install docker; next: run it by hand to see its error" >&2
[ -z "$made" ] || rm -f /usr/sbin/policy-rc.d
