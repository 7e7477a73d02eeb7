#!/usr/bin/env bash
# Runs all tests with the race detector. The packages that start a control plane run last and two at a time: each of them
# waits most of the time and uses half a core. Skipped tests are listed with their reasons at the end of each part.
set -euo pipefail
cd "$(dirname "$0")/.."

runner=$(go -C hack/tools tool -n gotestsum)
# The callers of this script build the binaries, so a missing one is an error.
export GPUSHARE_REQUIRE_CONTROL_PLANE=1
# go-nvml relies on lazy binding of the driver library; the toolchain's default can be different.
flags=(-race -count=1 -ldflags "-extldflags=-Wl,-z,lazy")

test_packages() {
  "$runner" --format pkgname --format-hide-empty-pkg -- "${flags[@]}" "$@"
}

go vet ./...
# hack/images is a separate module.
go -C hack/images vet ./...
(cd hack/images && test_packages ./...)
all=$(go list ./...)
control_plane='/test/(browser|controlplane|e2e|gang|install|preemption)'
# Needs a real kubelet, root, and system packages: make e2e-node.
real_node='/test/nodee2e$'
# The simulation runs in one goroutine, and the race detector makes it slow. So most of its steps are made without it.
go test -count=1 -timeout 60m -run '^TestSimulation$' ./pkg/scheduling
# shellcheck disable=SC2046 # one word per package is intended
GPUSHARE_SIM_STEPS=100000 test_packages $(grep -vE "$control_plane|$real_node" <<<"$all")
# shellcheck disable=SC2046
test_packages -p 2 -timeout "${GPUSHARE_TEST_LONG:+1}25m" $(grep -E "$control_plane" <<<"$all")
hack/alerts.sh
echo "NOT RUN: the tests on a real kubelet, which need root and containerd: make e2e-node"
