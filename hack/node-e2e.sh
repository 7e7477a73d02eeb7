#!/usr/bin/env bash
# Runs real pods on a real kubelet. Elsewhere than as root on Linux, with containerd and runc, it is skipped and says so;
# GPUSHARE_REQUIRE_NODE=1 makes that a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

export GPUSHARE_REQUIRE_CONTROL_PLANE=1
go test -count=1 -v -timeout 20m "$@" ./test/nodee2e
