#!/usr/bin/env bash
# Pins another Kubernetes version for `make test-versions` and `make e2e-node KUBERNETES=...` in its own module: hack/kube/pin.sh v1.34.4 writes
# hack/kube/v1.34. Run it to add or update a version and commit the result.
set -euo pipefail
cd "$(dirname "$0")"
export GOFLAGS=-mod=mod GOWORK=off

version=${1:?which version: hack/kube/pin.sh v1.34.4}
staging=v0.${version#v1.}
folder=${version%.*}
upstream=$(cd / && go mod download -json "k8s.io/kubernetes@$version" | awk -F'"' '$2 == "GoMod" {print $4}')

mkdir -p "$folder"
cd "$folder"
rm -f go.mod go.sum
{
  echo "// Kubernetes $version for \`make test-versions\`; written by hack/kube/pin.sh."
  echo "module github.com/gpushare/gpushare/hack/kube/$folder"
  echo
  echo "go 1.26.0"
  echo
  # The Go behaviour that this version was made for, with any Go toolchain.
  grep '^godebug default=' "$upstream" || echo "godebug default=$(awk '$1 == "go" {split($2, v, "."); print "go" v[1] "." v[2]}' "$upstream")"
  echo
  echo "require k8s.io/kubernetes $version"
  echo
  echo "// k8s.io/kubernetes names its staging modules v0.0.0 and finds them by path, which holds only inside its own tree."
  echo "replace ("
  grep -oE 'k8s.io/[a-z-]+ => \./staging' "$upstream" | awk -v v="$staging" '{print "\t" $1 " => " $1 " " v}'
  echo ")"
} > go.mod
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  go get -tool "k8s.io/kubernetes/cmd/$name@$version"
done
# Unneeded replacements stay: a later `go get` can need them.
go list -deps k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet} >/dev/null
echo "kube: hack/kube/$folder pins Kubernetes $version"
