#!/usr/bin/env bash
# Runs all tests. The programs' packages are tested with the race detector where it can find something. The suites in test/ wait for the
# programs that they start most of the time: each uses a third of a core, and no race detector, because those programs are built without it. So
# several suites run at a time, and the packages beside them. Skipped tests are listed with their reasons at the end of
# each part. `make lint` vets the code.
set -euo pipefail
cd "$(dirname "$0")/.."

runner=$(go -C hack/tools tool -n gotestsum)
# The callers of this script build the binaries, so a missing one is an error.
export GPUSHARE_REQUIRE_CONTROL_PLANE=1
# go-nvml relies on lazy binding of the driver library; the toolchain's default can be different. Without the debugger's
# tables (-w), linking takes two thirds of the time.
flags=(-count=1 -vet=off -ldflags "-w -extldflags=-Wl,-z,lazy")

test_packages() {
  "$runner" --format pkgname --format-hide-empty-pkg -- "${flags[@]}" "$@"
}

# The race detector makes tests ten times as slow, and finds something only where several goroutines run: in packages that start some, in their
# code or in their tests, and in those that use a library for it. The tests of simulations, those of eviction's executor, and those in files of
# the packages ledger and eligibility that start no goroutine, run without it.
concurrent='\bgo (func\b|[A-Za-z.]+\()|\.Go\(|\.Parallel\(|AfterFunc|"(net/http|github.com/fsnotify/|k8s.io/client-go/)'
# shellcheck disable=SC2046 # one word per file is intended
single="^($(grep -ohP '^func \KTest\w+' pkg/scheduling/{simulation*,odd_pods}_test.go pkg/eviction/executor_test.go $(grep -LE "$concurrent" pkg/{ledger,eligibility}/*_test.go) | sort -u | paste -sd '|'))\$"

packages() {
  local dir race=() plain=()
  for dir in $(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{end}}' ./cmd/... ./pkg/...); do
    case $dir in */pkg/scheduling | */pkg/ledger | */pkg/eligibility | */pkg/eviction) continue ;; esac
    if grep -qE "$concurrent" "$dir"/*.go; then race+=("$dir"); else plain+=("$dir"); fi
  done
  # Separate modules, which the linter doesn't read. hack/helm tests the chart's values with Helm as a library.
  for module in hack/images hack/helm; do
    go -C "$module" vet ./...
    (cd "$module" && test_packages ./...)
  done
  # The longest first. Many tests of the others wait, so more of them run at a time than there are processors.
  test_packages -race -skip "$single" ./pkg/scheduling ./pkg/ledger ./pkg/eligibility ./pkg/eviction
  test_packages -race -p 4 "${race[@]}"
  test_packages "${plain[@]}"
  test_packages -timeout 60m -run "$single" ./pkg/scheduling ./pkg/ledger ./pkg/eligibility ./pkg/eviction
  hack/alerts.sh
}

# A process group of its own, so that it can be ended as a whole.
set -m
packages &
running=$!
set +m
trap 'kill -- "-$running" 2>/dev/null || true' EXIT

status=0
# test/nodee2e needs a real kubelet, root, and system packages: make e2e-node. test/neighbours needs components of other
# projects: make test-neighbours. test/upgrade needs an earlier version: make test-upgrade.
# shellcheck disable=SC2046 # one word per package is intended
test_packages -p 4 -timeout "${GPUSHARE_TEST_LONG:+1}25m" $(go list ./test/... | grep -Ev '/test/(nodee2e|neighbours|upgrade)$') || status=$?
# A module of its own. Beside the packages alone, because those take longer than the suites.
(cd test/browser && test_packages -timeout "${GPUSHARE_TEST_LONG:+1}25m" ./...) || status=$?
wait "$running" || status=$?
echo "NOT RUN: the tests on a real kubelet, which need root and containerd: make e2e-node"
echo "NOT RUN: the tests with components of other projects: make test-neighbours"
echo "NOT RUN: the tests with an earlier version: make test-upgrade"
exit "$status"
