#!/usr/bin/env bash
# Runs every test, the race detector on. The packages that start a control plane come last and one by one: beside each
# other they would only wait for the same cores. Skipped tests are named, with their reasons, at the end of each part.
set -euo pipefail
cd "$(dirname "$0")/.."

runner=$(go -C hack/tools tool -n gotestsum)
# Whoever runs this has built the binaries: a test that can't find them is an error.
export GPUSHARE_REQUIRE_CONTROL_PLANE=1
# go-nvml relies on lazy binding of the driver library: made sure of, whatever the toolchain does by default.
flags=(-race -count=1 -ldflags "-extldflags=-Wl,-z,lazy")

test_packages() {
  "$runner" --format pkgname --format-hide-empty-pkg -- "${flags[@]}" "$@"
}

go vet ./...
# A module of its own.
go -C hack/images vet ./...
(cd hack/images && test_packages ./...)
all=$(go list ./...)
control_plane='/test/(browser|controlplane|e2e|gang|install|preemption)'
# Takes a real kubelet, root, and packages of the system: a target of its own.
real_node='/test/nodee2e$'
# shellcheck disable=SC2046 # one word a package is what is wanted
test_packages $(grep -vE "$control_plane|$real_node" <<<"$all")
# shellcheck disable=SC2046
test_packages -p 1 -timeout "${GPUSHARE_TEST_LONG:+1}25m" $(grep -E "$control_plane" <<<"$all")
hack/alerts.sh
echo "NOT RUN HERE: the tests on a real kubelet, which take root and containerd: make e2e-node"
