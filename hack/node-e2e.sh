#!/usr/bin/env bash
# Runs real pods on a real kubelet: some hundreds, or with GPUSHARE_TEST_LONG=1 more than a thousand. Elsewhere than as
# root on Linux, with containerd, runc, cgroups and namespaces to be had, it is skipped and says why;
# GPUSHARE_REQUIRE_NODE=1 makes that a failure. Arguments go to `go test`: hack/node-e2e.sh -run TestPods
set -euo pipefail
cd "$(dirname "$0")/.."

export GPUSHARE_REQUIRE_CONTROL_PLANE=1
go test -count=1 -v -parallel 2 -timeout 30m "$@" ./test/nodee2e
