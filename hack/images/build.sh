#!/usr/bin/env bash
# Builds the images as archives, without a container engine: hack/images/build.sh [GOARCH...] writes
# bin/images/{extender,device-plugin}-GOARCH.tar, for this machine's architecture where none is named. They are imported
# with `ctr --namespace k8s.io images import`, `docker load` or `skopeo copy oci-archive:…`. A foreign architecture takes
# a cross compiler (on Debian gcc-aarch64-linux-gnu and libc6-dev-arm64-cross).
set -euo pipefail
cd "$(dirname "$0")/../.."

version=${VERSION:?set by make} commit=${COMMIT:?set by make} registry=${REGISTRY:-ghcr.io/gpushare} out=${OUT:-bin/images}
native=$(go env GOHOSTARCH)
[ $# -gt 0 ] || set -- "$native"
for arch; do
  binaries=bin
  if [ "$arch" != "$native" ]; then
    binaries=bin/linux-$arch
    case $arch in
    arm64) compiler=aarch64-linux-gnu-gcc ;;
    amd64) compiler=x86_64-linux-gnu-gcc ;;
    *) echo "images: no cross compiler is known for $arch" >&2; exit 1 ;;
    esac
    command -v "$compiler" >/dev/null || { echo "images: $arch takes $compiler, and the C library for it" >&2; exit 1; }
    GOARCH=$arch CC=$compiler make --no-print-directory build BIN="$binaries"
  fi
  mkdir -p "$out"
  for image in extender device-plugin; do
    rootfs=$out/$image-$arch
    hack/images/rootfs.sh "$image" "$arch" "$binaries" "$rootfs"
    go run ./hack/images -dockerfile "Dockerfile.${image/-/}" -arg "VERSION=$version" -arg "COMMIT=$commit" \
      -arch "$arch" -rootfs "$rootfs" -name "$registry/gpushare-$image:$version" -o "$rootfs.tar"
    rm -rf "$rootfs"
  done
done
