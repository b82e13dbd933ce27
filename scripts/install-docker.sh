#!/bin/sh
# Docker's daemon, a busybox to make an image of, and sshd, for the tests that run containers; on a machine where this may be
# done (root, apt-get). Nothing is started.
set -eu
if command -v dockerd >/dev/null && command -v containerd >/dev/null && command -v docker-init >/dev/null &&
    [ -x /bin/busybox ] && [ -x /usr/sbin/sshd ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no dockerd here, and no right to install it; next: sudo apt-get install docker.io busybox-static" >&2
    exit 0 # whether that matters is for the tests to say
fi
echo "installing docker" >&2
export DEBIAN_FRONTEND=noninteractive
# The daemon of the package must not start: the tests start their own.
made=
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d && made=yes
fi
install() { apt-get install -y -qq --no-install-recommends docker.io containerd runc tini busybox-static openssh-server; }
{ install || { apt-get update -qq && install; }; } >/dev/null 2>&1 || echo "docker could not be installed with apt-get" >&2
[ -z "$made" ] || rm -f /usr/sbin/policy-rc.d
