{{/*
The extender's ClusterIP: the value, else that of the installed Service, else the 15th address of the Service range. An
IPv4 range starts at a multiple of its size, and Service default/kubernetes has its first address, so the last octet of
that address is at most 241. Adding 14 to it stays within a range of /28 or larger.
*/}}
{{- define "gpushare.clusterIP" -}}
{{- $given := .Values.extender.service.clusterIP -}}
{{- $installed := lookup "v1" "Service" .Release.Namespace (printf "%s-extender" (include "gpushare.fullname" .)) -}}
{{- $first := lookup "v1" "Service" "default" "kubernetes" -}}
{{- if $given -}}
{{ $given }}
{{- else if $installed -}}
{{ $installed.spec.clusterIP }}
{{- else if not $first -}}
{{ fail "extender.service.clusterIP: no cluster can be asked for its Service range (helm template, a dry run on the client, or no right to read Service default/kubernetes). Give a free address of it, such as 10.96.0.15 where the range is 10.96.0.0/12" }}
{{- /* "helm lint", which never asks a cluster, only logs the failure. It goes on with this address. */ -}}
10.96.0.15
{{- else if regexMatch "^[0-9.]+$" $first.spec.clusterIP -}}
{{- $octets := splitList "." $first.spec.clusterIP -}}
{{ join "." (append (initial $octets) (add 14 (last $octets | int) | toString)) }}
{{- else if hasSuffix ":1" $first.spec.clusterIP -}}
{{ trimSuffix "1" $first.spec.clusterIP }}f
{{- else -}}
{{ fail (printf "extender.service.clusterIP: give a free address of the Service range; none can be derived from %s" $first.spec.clusterIP) }}
{{- end -}}
{{- end }}

{{- define "gpushare.url" -}}
{{- if not (include "gpushare.byService" .) -}}
http://127.0.0.1:12345/gpushare-scheduler
{{- else -}}
{{- $address := .address -}}
{{- $host := ternary (printf "[%s]" $address) $address (contains ":" $address) -}}
{{ ternary "https" "http" (eq "yes" (include "gpushare.tls" .)) }}://{{ $host }}:{{ .Values.extender.service.port }}/gpushare-scheduler
{{- end -}}
{{- end }}
