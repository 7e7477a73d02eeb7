#!/usr/bin/env bash
# Installs what a real node takes, where it is missing: containerd with its ctr, and runc. For Debian and Ubuntu, as root.
set -euo pipefail

need=()
command -v containerd >/dev/null && command -v ctr >/dev/null || need+=(containerd)
command -v runc >/dev/null || need+=(runc)
command -v nsenter >/dev/null && command -v setpriv >/dev/null || need+=(util-linux)
if [ ${#need[@]} -gt 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${need[@]}"
fi
