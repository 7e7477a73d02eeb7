#!/usr/bin/env bash
# Builds the images as archives, without a container engine: hack/images/build.sh [GOARCH...] writes
# bin/images/{extender,device-plugin,device-plugin-simulated}-GOARCH.tar, by default for this machine's architecture. Import archives with
# `ctr --namespace k8s.io images import`, `docker load` or `skopeo copy oci-archive:…`. Another architecture needs a cross compiler and the C
# library (on Debian gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and libc6:arm64). Equal inputs give equal files.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD

version=${VERSION:?set by make} commit=${COMMIT:?set by make} registry=${REGISTRY:-ghcr.io/gpushare} out=${OUT:-bin/images}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# pack FOLDER FILE writes a tar file that depends only on the names and contents in the folder.
pack() {
  (LC_ALL=C && cd "$1" &&
    tar --create --file "$2" --format gnu --sort name --mtime @0 --owner 0 --group 0 --numeric-owner --mode u=rwX,go=rX -- *)
}

native=$(go env GOHOSTARCH)
[ $# -gt 0 ] || set -- "$native"
for arch; do
  binaries=bin compiler=${CC:-cc}
  if [ "$arch" != "$native" ]; then
    binaries=bin/linux-$arch
    case $arch in
    arm64) compiler=aarch64-linux-gnu-gcc ;;
    amd64) compiler=x86_64-linux-gnu-gcc ;;
    *) echo "images: no known cross compiler for $arch" >&2; exit 1 ;;
    esac
    command -v "$compiler" >/dev/null || { echo "images: $arch needs $compiler and its C library" >&2; exit 1; }
    GOARCH=$arch CC=$compiler make --no-print-directory build BIN="$binaries"
  fi
  for image in extender device-plugin device-plugin-simulated; do
    name=$registry/gpushare-$image:$version archive=$out/$image-$arch.tar
    CC=$compiler hack/images/rootfs.sh "$image" "$arch" "$binaries" "$work/rootfs"
    pack "$work/rootfs" "$work/layer.tar"
    case $image in
    extender) described=(-dockerfile "$root/Dockerfile.extender") ;;
    *) described=(-dockerfile "$root/Dockerfile.deviceplugin" -arg "SIMULATED=${image#device-plugin}") ;;
    esac
    go -C hack/images run . "${described[@]}" -arg "VERSION=$version" -arg "COMMIT=$commit" \
      -arch "$arch" -layer "$work/layer.tar" -name "$name" -layout "$work/layout"
    pack "$work/layout" "$archive"
    echo "$archive is $name"
  done
done
