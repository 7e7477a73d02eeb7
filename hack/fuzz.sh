#!/usr/bin/env bash
# Runs every fuzz target of the project for FUZZTIME.
set -euo pipefail
cd "$(dirname "$0")/.."
grep -rlE '^func Fuzz' --include='*_test.go' . | xargs -n1 dirname | sort -u | while read -r package; do
  grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$package"/*_test.go | sed 's/^func //' | while read -r target; do
    echo "fuzz: $package $target"
    go test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-10s}" "$package"
  done
done
