#!/usr/bin/env bash
# Runs real pods on a real kubelet: some hundreds, or more than a thousand with GPUSHARE_TEST_LONG=1. Needs root on
# Linux with containerd, runc, cgroups and namespaces; otherwise the tests are skipped with the reason, or fail with
# GPUSHARE_REQUIRE_NODE=1. Arguments are passed to `go test`: hack/node-e2e.sh -run TestPods. KUBERNETES=v1.34 selects another
# Kubernetes version that hack/kube pins; containerd, kubeadm and kube-proxy are always those of `make kube`.
set -euo pipefail
cd "$(dirname "$0")/.."

export GPUSHARE_REQUIRE_CONTROL_PLANE=1
if [ -n "${KUBERNETES:-}" ]; then
  hack/kube/build.sh "$KUBERNETES" kubelet
  export GPUSHARE_TEST_KUBERNETES=$KUBERNETES
fi
# The tests wait for most of their time: alone, each uses a sixth of two cores. With five clusters at a time, kubelets lack inotify instances
# (fs.inotify.max_user_instances is 128 by default).
go test -count=1 -v -parallel 4 -timeout 30m "$@" ./test/nodee2e
