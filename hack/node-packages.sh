#!/usr/bin/env bash
# Installs the missing packages for a real node. containerd, runc and CNI plugins are built instead (make kube-node). For
# Debian and Ubuntu, as root.
set -euo pipefail

need=()
# For the test with a pod network.
command -v iptables >/dev/null || need+=(iptables)
command -v ip >/dev/null || need+=(iproute2)
command -v nsenter >/dev/null && command -v setpriv >/dev/null || need+=(util-linux)
if [ ${#need[@]} -gt 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${need[@]}"
fi
