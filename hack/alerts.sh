#!/usr/bin/env bash
# Tests the alert rules with promtool, which is built into bin/ on the first run.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x bin/promtool ] || [ hack/promtool/go.mod -nt bin/promtool ]; then
  echo "alerts: building promtool (a minute or two, on the first run)"
  go build -C hack/promtool -tags remove_all_sd -o ../../bin/promtool github.com/prometheus/prometheus/cmd/promtool
  touch bin/promtool
fi
cd deploy/monitoring
../../bin/promtool check rules ../helm/gpushare/files/rules.yaml
../../bin/promtool test rules rules_test.yaml
