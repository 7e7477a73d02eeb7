{{/* The labels of every object; the argument is (list . component). */}}
{{- define "gpushare.labels" -}}
{{ include "gpushare.selector" . }}
{{- $root := index . 0 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
{{- end }}

{{- define "gpushare.selector" -}}
app.kubernetes.io/name: gpushare
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* An image; the argument is (list image tagByDefault). */}}
{{- define "gpushare.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end }}

{{/* The cluster's version as in the tags of kube-scheduler's images, without suffixes of providers. */}}
{{- define "gpushare.kubernetesVersion" -}}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{- end }}

{{- define "gpushare.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ .name }}
{{- end }}

{{/* Not empty if the API server has ValidatingAdmissionPolicies and passes on the node of a bound token: 1.30 and later. */}}
{{- define "gpushare.hasPolicies" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}yes{{ end -}}
{{- end }}

{{- define "gpushare.secondScheduler" -}}
{{- if eq .Values.mode "secondScheduler" }}yes{{ end -}}
{{- end }}

{{/* Not empty if the extender is reached through its Service. */}}
{{- define "gpushare.byService" -}}
{{- if and (eq .Values.mode "extender") (eq .Values.extender.reach "service") }}yes{{ end -}}
{{- end }}

{{- define "gpushare.tls" -}}
{{- if and (include "gpushare.byService" .) (ne .Values.extender.tls.mode "none") }}yes{{ end -}}
{{- end }}

{{/* Fields that the pods of the extender and of the second scheduler have in common. */}}
{{- define "gpushare.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpushare.restrictedContainer" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
