#!/usr/bin/env bash
# Runs a telling part of the control plane's tests on the other Kubernetes that hack/kube pins: scheduling, nodes,
# preemption, the chart with its policies, the plain manifests, kubeadm's static pod, the second scheduler. kubeadm itself is the
# one of `make kube` for all of them. Arguments name some of the versions: hack/versions.sh v1.33. What has been built is
# kept, as with `make kube`.
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
