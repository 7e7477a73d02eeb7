#!/usr/bin/env bash
# Runs a selection of the control-plane tests on the other Kubernetes versions that hack/kube pins: scheduling, nodes,
# preemption, the chart with its policies, the plain manifests, kubeadm's static pod, the second scheduler. kubeadm
# itself is always that of `make kube`. Arguments select versions: hack/versions.sh v1.34. As with `make kube`, built
# binaries are kept.
set -euo pipefail
cd "$(dirname "$0")/.."

export GPUSHARE_REQUIRE_CONTROL_PLANE=1
[ $# -gt 0 ] || set -- $(cd hack/kube && ls -d v*)
tests=$(mktemp -d)
trap 'rm -rf "$tests"' EXIT
go test -c -o "$tests/" -ldflags "-w -extldflags=-Wl,-z,lazy" ./test/e2e ./test/preemption ./test/install

run() {
  for package; do
    (cd "test/$package" && exec "$tests/$package.test" -test.timeout 15m \
      -test.run '^(TestScheduling|TestNode|TestPreemption|TestInstall|TestManifests|TestKubeadm|TestSecondScheduler)$') || return
    echo "$package passed after $((SECONDS - started)) s"
  done
}

for version; do
  hack/kube/build.sh "$version"
  echo "== Kubernetes $version"
  export GPUSHARE_TEST_KUBERNETES=$version
  started=$SECONDS
  # Two clusters at a time, because a part of their time is waiting.
  run e2e preemption &
  run install || { wait; exit 1; }
  wait $! # The status of the first.
done
