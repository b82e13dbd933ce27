#!/bin/sh
# Installs Slurm with its daemons, for the tests and benchmarks that need it. Needs root and apt-get.
set -eu
if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v slurmrestd >/dev/null &&
    command -v munged >/dev/null && command -v sbatch >/dev/null; then exit 0; fi
packages="slurm-wlm slurm-client slurmctld slurmd slurmrestd munge slurm-wlm-basic-plugins slurm-wlm-jwt-plugin"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm is missing, and installing it needs root; next: sudo apt-get install $packages" >&2
    exit 0 # the tests decide whether it is required
fi
echo "installing slurm" >&2
export DEBIAN_FRONTEND=noninteractive
# The tests start the daemons. Without this file the packages would start theirs.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
# shellcheck disable=SC2086  # a list of packages
{ apt-get install -y -qq --no-install-recommends $packages ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; }; } >/dev/null 2>&1 ||
    echo "apt-get failed to install slurm; next: run it by hand to see its error" >&2
