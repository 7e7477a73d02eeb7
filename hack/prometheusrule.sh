#!/usr/bin/env bash
# Writes deploy/monitoring/prometheusrule.yaml, for the Prometheus operator, from the plain rules.
set -euo pipefail
cd "$(dirname "$0")/../deploy/monitoring"
{
  cat <<'HEAD'
# Generated from rules.yaml by hack/prometheusrule.sh: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gpushare
  namespace: kube-system
  labels:
    app.kubernetes.io/part-of: gpushare
spec:
HEAD
  sed -n '/^groups:/,$s/^/  /p' rules.yaml
} >prometheusrule.yaml
