#!/bin/sh
# An SSH server, for the tests of `hodei host add`, on a machine with root and apt-get.
set -eu
if [ -x /usr/sbin/sshd ] && command -v ssh-keygen >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no sshd here, and no right to install it; next: sudo apt-get install openssh-server" >&2
    exit 0 # whether that matters is for the tests to say
fi
echo "installing openssh-server" >&2
export DEBIAN_FRONTEND=noninteractive
# The tests start it: without this file the package would start its own at once.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
{ apt-get install -y -qq --no-install-recommends openssh-server ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server; }; } >/dev/null 2>&1 ||
    echo "openssh-server could not be installed with apt-get" >&2
