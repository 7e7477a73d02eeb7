#!/bin/sh
# Builds the fake NVML: build.sh OUT/libnvidia-ml.so.1 [compiler flags]
# -DFAKE_NVML_BEFORE_R615 omits the functions for memory limits.
set -eu

out=${1:?usage: build.sh OUT/libnvidia-ml.so.1 [flags]}
shift
src=$(cd "$(dirname "$0")/src" && pwd)
mkdir -p "$(dirname "$out")"
# Renamed into place: `.ci/run` builds it while other tests load it.
"${CC:-cc}" -std=c11 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -pthread \
	-Wl,-soname,libnvidia-ml.so.1 -o "$out.$$" "$@" "$src"/*.c
mv "$out.$$" "$out"
