#!/usr/bin/env bash
# Builds the extender of an earlier commit from git's history, for `make test-upgrade`: hack/former.sh COMMIT. It is linked as bin/former, with the
# chart and the manifests of that commit.
#
# As with hack/kube/build.sh, it is kept in the user's cache folder (or GPUSHARE_KUBE_CACHE), under a hash of the commit and the Go toolchain.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(git rev-parse --show-toplevel 2>/dev/null)" != "$(pwd -P)" ]; then
  echo "former: this folder is no git clone, and the earlier version is built from git's history: run it in a clone of the repository" >&2
  exit 1
fi
if ! commit=$(git rev-parse --verify --quiet "$1^{commit}"); then
  echo "former: commit $1 is not in this clone; if it is a shallow one, git fetch --unshallow gets the whole history" >&2
  exit 1
fi

key=$( (go version; go env GOOS GOARCH; echo "$commit") | sha256sum | cut -c1-16)
cache=${GPUSHARE_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpushare}/former-$key
mkdir -p "$(dirname "$cache")" bin
exec 9>"$cache.lock"
flock 9
if [ ! -e "$cache" ]; then
  echo "former: building the extender of commit ${commit:0:12} (takes a minute the first time)"
  tree=$(mktemp -d)
  trap 'rm -rf "$tree"' EXIT
  git archive "$commit" -- cmd pkg deploy go.mod go.sum | tar -x -C "$tree"
  # The caller's -mod or workspace are meant for the present version.
  stamp="-X github.com/gpushare/gpushare/pkg/version.version=$(git describe --tags --always "$commit")"
  GOFLAGS=-trimpath GOWORK=off CGO_ENABLED=0 go -C "$tree" build -buildvcs=false -ldflags "-s -w $stamp" -o gpushare-extender ./cmd/gpushare-extender
  rm -rf "$cache.partial"
  mkdir "$cache.partial"
  mv "$tree/gpushare-extender" "$tree/deploy" "$cache.partial/"
  mv "$cache.partial" "$cache"
fi
ln -sfn "$cache" bin/former
echo "former: the extender of commit ${commit:0:12} is in bin/former"
