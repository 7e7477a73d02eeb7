#!/usr/bin/env bash
# Builds the pinned etcd and Kubernetes binaries into bin/kube, once. With a minor version that hack/kube/VERSION pins
# (hack/kube/build.sh v1.33), builds that version's control plane into bin/kube-VERSION, with the same etcd.
#
# The binaries depend on the pinned modules, the Go toolchain and the flags below. They are kept under a hash of these
# in the user's cache folder (or GPUSHARE_KUBE_CACHE) and linked from there, so another clone on the same machine
# doesn't build them again. The rest of this script isn't hashed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pinned=${1:-}
out=$(cd "$here/../.." && pwd)/bin/kube${pinned:+-$pinned}

cd "$here/$pinned"
# The caller's -mod or GOFLAGS are meant for the main module.
export GOFLAGS=-buildvcs=false GOWORK=off
kube_version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
# Otherwise the binaries report version v0.0.0-master, which clients reject.
major=${kube_version#v}; major=${major%%.*}
minor=${kube_version#v*.}; minor=${minor%%.*}
stamp="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  stamp+=" -X $package.gitVersion=$kube_version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
  stamp+=" -X $package.gitTreeState=clean -X $package.gitCommit=$kube_version -X $package.buildDate=1970-01-01T00:00:00Z"
done
flags=(-trimpath -ldflags "$stamp")

key=$( (go version; go env GOOS GOARCH; cat go.mod go.sum; echo CGO_ENABLED=0 "${flags[@]}") | sha256sum | cut -c1-16)
cache=${GPUSHARE_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpushare/kube}/$kube_version-$key
mkdir -p "$cache" "$out"

# One build at a time: two would only compete for the same cores.
exec 9>"$cache/.lock"
flock 9

build() { # name package
  if [ ! -x "$cache/$1" ]; then
    local from=$SECONDS
    echo "kube: building $1 (takes minutes the first time)"
    CGO_ENABLED=0 go build "${flags[@]}" -o "$cache/$1.partial" "$2"
    mv "$cache/$1.partial" "$cache/$1"
    echo "kube: built $1 in $((SECONDS - from)) s"
  fi
  ln -sf "$cache/$1" "$out/$1"
}

components=(kube-apiserver kube-scheduler kube-controller-manager)
if [ -z "$pinned" ]; then
  build etcd go.etcd.io/etcd/server/v3
  components+=(kubelet kube-proxy kubeadm)
else
  ln -sf ../kube/etcd "$out/etcd"
fi
for name in "${components[@]}"; do
  build "$name" "k8s.io/kubernetes/cmd/$name"
done
echo "kube: Kubernetes $kube_version and etcd are in bin/$(basename "$out")"
