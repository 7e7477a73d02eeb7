#!/usr/bin/env bash
# Creates an image's file system: hack/images/rootfs.sh IMAGE GOARCH BINARIES FOLDER. The Dockerfiles run it in their
# build stage and copy all of FOLDER; hack/images/build.sh uses the same files for the archives.
set -euo pipefail
image=$1 arch=$2 binaries=$3 out=$4
root=$(cd "$(dirname "$0")/../.." && pwd)

rm -rf "$out"
install -D -m 644 "$root/LICENSE" "$out/usr/share/doc/gpushare/copyright"
case $image in
extender)
  install -D -m 755 "$binaries/gpushare-extender" "$out/gpushare-extender"
  ;;
device-plugin | device-plugin-simulated)
  # Of Debian only the C library: the plugin needs it, and so does the driver library, which NVIDIA's container runtime
  # mounts. The runtime checks debian_version to find the folder for libraries.
  case $arch in
  amd64) triplet=x86_64-linux-gnu loader=lib64/ld-linux-x86-64.so.2 ;;
  arm64) triplet=aarch64-linux-gnu loader=lib/ld-linux-aarch64.so.1 ;;
  *) echo "images: no known C library for $arch" >&2; exit 1 ;;
  esac
  # The distribution's own package gets security updates; a cross compiler's copy doesn't.
  libraries=/usr/lib/$triplet
  if [ ! -e "$libraries/libc.so.6" ] || ! dpkg-query --status "libc6:$arch" >/dev/null 2>&1; then
    echo "images: no C library for $arch: on Debian, dpkg --add-architecture $arch, apt-get update, apt-get install libc6:$arch" >&2
    exit 1
  fi
  mkdir -p "$out/usr/lib/$triplet" "$out/usr/lib64" "$out/etc" "$out/var/lib/dpkg/status.d"
  ln -s usr/lib "$out/lib"
  ln -s usr/lib64 "$out/lib64"
  # Since glibc 2.34, libc contains them all; libraries built earlier still link to the others.
  for library in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1; do
    install -m 755 "$libraries/$library" "$out/usr/lib/$triplet/$library"
  done
  install -m 755 "$libraries/$(basename "$loader")" "$out/usr/lib/$triplet/"
  ln -s "/usr/lib/$triplet/$(basename "$loader")" "$out/usr/$loader"
  [ ! -e /usr/share/doc/libc6/copyright ] || install -D -m 644 /usr/share/doc/libc6/copyright "$out/usr/share/doc/libc6/copyright"
  # Scanners find the C library's version and its vulnerabilities with these.
  dpkg-query --status "libc6:$arch" >"$out/var/lib/dpkg/status.d/libc6"
  install -m 644 /etc/os-release /etc/debian_version "$out/etc/"
  install -D -m 755 "$binaries/gpushare-device-plugin" "$out/usr/bin/gpushare-device-plugin"
  # The fake driver library, for a trial without cards (docs/try.md). It is one that can't limit memory: no card enforces a limit.
  [ "$image" = device-plugin ] || "$root/test/fakenvml/build.sh" "$out/usr/lib/$triplet/libnvidia-ml.so.1" -DFAKE_NVML_BEFORE_R615
  ;;
*)
  echo "images: unknown image $image" >&2
  exit 1
  ;;
esac
