#!/usr/bin/env bash
# Runs a selection of the control-plane tests on the other Kubernetes versions that hack/kube pins: scheduling, nodes,
# preemption, the chart with its policies, the plain manifests, kubeadm's static pod, the second scheduler. kubeadm
# itself is always that of `make kube`. Arguments select versions: hack/versions.sh v1.33. As with `make kube`, built
# binaries are kept.
set -euo pipefail
cd "$(dirname "$0")/.."

export GPUSHARE_REQUIRE_CONTROL_PLANE=1
[ $# -gt 0 ] || set -- $(cd hack/kube && ls -d v*)
for version; do
  hack/kube/build.sh "$version"
  echo "== Kubernetes $version"
  GPUSHARE_TEST_KUBERNETES=$version go test -count=1 -p 1 -timeout 15m -ldflags "-extldflags=-Wl,-z,lazy" \
    -run '^(TestScheduling|TestNode|TestPreemption|TestInstall|TestManifests|TestKubeadm|TestSecondScheduler)$' \
    ./test/e2e ./test/preemption ./test/install
done
