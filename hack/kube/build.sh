#!/usr/bin/env bash
# Builds pinned binaries of other projects, once:
#
#   hack/kube/build.sh          etcd and Kubernetes, into bin/kube
#   hack/kube/build.sh control-plane [PROGRAM...]   of these only etcd, kube-apiserver and kube-scheduler, and the named ones
#   hack/kube/build.sh v1.34    the control plane of a minor version that hack/kube/VERSION pins, into bin/kube-VERSION,
#                               with the same etcd
#   hack/kube/build.sh v1.34 kubelet     also its kubelet
#   hack/kube/build.sh node     what a node runs below the kubelet (hack/kube/node), into bin/kube
#   hack/kube/build.sh neighbours   components of other projects (hack/kube/neighbours), into bin/kube
#
# The binaries depend on the pinned modules, the Go toolchain and the flags below. They are kept under a hash of these
# in the user's cache folder (or GPUSHARE_KUBE_CACHE) and linked from there, so another clone on the same machine
# doesn't build them again. The rest of this script isn't hashed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
part=${1:-} more=(kube-controller-manager kubelet kube-proxy kubeadm)
case $part in
  control-plane) part='' more=("${@:2}") ;;
  v*) more=(kube-controller-manager "${@:2}") ;;
esac

cd "$here/$part"
# The caller's -mod or GOFLAGS are meant for the main module.
export GOFLAGS=-buildvcs=false GOWORK=off
out=$(cd "$here/../.." && pwd)/bin/kube
stamp="-s -w"
# What calls NVIDIA's driver library finds its functions when it calls them. The bindings have all of them, and the compiler would
# warn of each deprecated one.
lazy="-extldflags=-Wl,-z,lazy" nvml_flags="-g -O2 -Wno-deprecated-declarations"

# use_cache NAME FLAGS... selects the folder for the binaries that are built with these flags.
use_cache() {
  local key name=$1
  shift
  key=$( (go version; go env GOOS GOARCH; cat go.mod go.sum; echo "$@") | sha256sum | cut -c1-16)
  cache=${GPUSHARE_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpushare/kube}/$name-$key
  mkdir -p "$cache" "$out"
  # One build at a time: two would only compete for the same cores.
  exec 9>"$cache/.lock"
  flock 9
}

build() { # name package flags...
  local name=$1 package=$2
  shift 2
  if [ ! -x "$cache/$name" ]; then
    local from=$SECONDS
    echo "kube: building $name (takes minutes the first time)"
    go build -trimpath "$@" -o "$cache/$name.partial" "$package"
    mv "$cache/$name.partial" "$cache/$name"
    echo "kube: built $name in $((SECONDS - from)) s"
  fi
  ln -sf "$cache/$name" "$out/$name"
}

build_kubernetes() {
  local kube_version major minor package name
  kube_version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
  # Otherwise the binaries report version v0.0.0-master, which clients reject.
  major=${kube_version#v}; major=${major%%.*}
  minor=${kube_version#v*.}; minor=${minor%%.*}
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    stamp+=" -X $package.gitVersion=$kube_version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
    stamp+=" -X $package.gitTreeState=clean -X $package.gitCommit=$kube_version -X $package.buildDate=1970-01-01T00:00:00Z"
  done
  use_cache "$kube_version" CGO_ENABLED=0 -trimpath -ldflags "$stamp"

  export CGO_ENABLED=0
  if [ -z "$part" ]; then
    build etcd go.etcd.io/etcd/server/v3 -ldflags "$stamp"
  else
    ln -sf ../kube/etcd "$out/etcd"
  fi
  for name in kube-apiserver kube-scheduler "${more[@]}"; do
    build "$name" "k8s.io/kubernetes/cmd/$name" -ldflags "$stamp"
  done
  echo "kube: Kubernetes $kube_version and etcd are in bin/$(basename "$out")"
}

build_node() {
  local containerd=github.com/containerd/containerd/v2/cmd tags=no_btrfs,no_devmapper,no_zfs,no_tracing name
  local plugins=github.com/containernetworking/plugins/plugins
  use_cache node "$tags" "$stamp" "$lazy"

  for name in containerd containerd-shim-runc-v2 ctr; do
    CGO_ENABLED=0 build "$name" "$containerd/$name" -tags "$tags" -ldflags "$stamp"
  done
  CGO_ENABLED=0 build bridge "$plugins/main/bridge" -ldflags "$stamp"
  CGO_ENABLED=0 build host-local "$plugins/ipam/host-local" -ldflags "$stamp"
  CGO_ENABLED=1 build runc github.com/opencontainers/runc -ldflags "$stamp"
  CGO_ENABLED=1 CGO_CFLAGS=$nvml_flags build nvidia-cdi-hook \
    github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook -ldflags "$stamp $lazy"
  echo "kube: containerd, runc, CNI plugins and nvidia-cdi-hook are in bin/kube"
}

build_neighbours() {
  local module folder nfd=sigs.k8s.io/node-feature-discovery
  use_cache neighbours CGO_ENABLED=0 -trimpath -ldflags "$stamp"

  CGO_ENABLED=0 build descheduler sigs.k8s.io/descheduler/cmd/descheduler -ldflags "$stamp"
  while read -r module folder; do
    link_folder "$module" "$folder" crds
  done <<'END'
github.com/prometheus-operator/prometheus-operator example/prometheus-operator-crd
github.com/cert-manager/cert-manager deploy/crds
END

  build_neighbour kueue kueue sigs.k8s.io/kueue/cmd/kueue
  link_folder sigs.k8s.io/kueue charts/kueue charts

  # Its image has the host's sysfs at /host-sys. Here that is relative to the working directory, so that a test has one of its own.
  local host="-X $nfd/pkg/utils/hostpath.pathPrefix=host-"
  build_neighbour nfd nfd-master $nfd/cmd/nfd-master "$host"
  build_neighbour nfd nfd-worker $nfd/cmd/nfd-worker "$host"
  link_folder $nfd deployment/base manifests

  build_neighbour lws lws sigs.k8s.io/lws/cmd
  link_folder sigs.k8s.io/lws charts/lws charts
  build_neighbour jobset jobset sigs.k8s.io/jobset
  link_folder sigs.k8s.io/jobset charts/jobset charts

  cgo=1 build_neighbour dra-driver gpu-kubelet-plugin sigs.k8s.io/dra-driver-nvidia-gpu/cmd/gpu-kubelet-plugin "$lazy"
  echo "kube: the neighbours and the kinds of other operators are in bin/kube"
}

# build_neighbour FOLDER NAME PACKAGE [LDFLAGS] builds a program from a module of its own in hack/kube/neighbours/FOLDER: the neighbours
# need different versions of the client libraries. cgo=1 is for those with C code. What follows it works in that module.
build_neighbour() {
  local flags="$stamp${4:+ $4}" cgo=${cgo:-0}
  cd "$here/neighbours/$1"
  use_cache "neighbours-$1" "CGO_ENABLED=$cgo" -trimpath -ldflags "$flags"
  CGO_ENABLED=$cgo CGO_CFLAGS=$nvml_flags build "$2" "$3" -ldflags "$flags"
}

# link_folder MODULE FOLDER WHERE links a folder of a pinned module into bin/kube/WHERE, under the last part of the module's path.
link_folder() {
  go mod download "$1"
  mkdir -p "$out/$3"
  ln -sfn "$(go list -m -f '{{.Dir}}' "$1")/$2" "$out/$3/$(basename "$1")"
}

case $part in
  node) build_node ;;
  neighbours) build_neighbours ;;
  *) out+=${part:+-$part}; build_kubernetes ;;
esac
