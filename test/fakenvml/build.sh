#!/bin/sh
# Builds the fake NVML: build.sh OUT/libnvidia-ml.so.1 [more flags for the compiler]
# -DFAKE_NVML_OLD leaves out the functions that old drivers don't have.
set -eu

out=${1:?usage: build.sh OUT/libnvidia-ml.so.1 [flags]}
shift
src=$(cd "$(dirname "$0")/src" && pwd)
mkdir -p "$(dirname "$out")"
exec "${CC:-cc}" -std=c11 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -pthread \
	-Wl,-soname,libnvidia-ml.so.1 -o "$out" "$@" "$src"/*.c
