{{/*
The beginning of the objects' names. The default is fixed, whatever the release's name. nameOverride selects Helm's usual rule.
*/}}
{{- define "gpushare.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if not .Values.nameOverride -}}
gpushare
{{- else if contains .Values.nameOverride .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-{{ .Values.nameOverride }}
{{- end -}}
{{- end }}

{{/* The labels of every object; the argument is (list . component). */}}
{{- define "gpushare.labels" -}}
{{ include "gpushare.selector" . }}
{{- $root := index . 0 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
{{- end }}

{{/* The name differs between releases, so that no selector finds the pods of another release in its namespace. */}}
{{- define "gpushare.selector" -}}
app.kubernetes.io/name: {{ include "gpushare.fullname" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/*
An image; the argument is (list . image tagByDefault). imageRegistry replaces the first part of the repository if that is a
registry, which has a dot or a port in its name.
*/}}
{{- define "gpushare.image" -}}
{{- $image := index . 1 -}}
{{- $repository := $image.repository -}}
{{- with (index . 0).Values.imageRegistry -}}
{{- $repository = regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "" | printf "%s/%s" . -}}
{{- end -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default (index . 2) }}
{{- end -}}
{{- end }}

{{/* The cluster's version as in the tags of kube-scheduler's images, without suffixes of providers. */}}
{{- define "gpushare.kubernetesVersion" -}}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{- end }}

{{/* The port of the web page, if it has an address of its own. */}}
{{- define "gpushare.pagePort" -}}
{{- if .Values.extender.ui.enabled }}{{ regexFind "[0-9]+$" (.Values.extender.ui.listenAddress | default "" | toString) }}{{ end -}}
{{- end }}

{{/* Not empty if the API server has ValidatingAdmissionPolicies and passes on the node of a bound token: 1.30 and later. */}}
{{- define "gpushare.hasPolicies" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}yes{{ end -}}
{{- end }}

{{/* Not empty if the cluster has MutatingAdmissionPolicies. */}}
{{- define "gpushare.hasMutatingPolicies" -}}
{{- if or (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") }}yes{{ end -}}
{{- end }}

{{/* Not empty if tenants share the cluster fairly. Without quotes, off in a file of values is false. */}}
{{- define "gpushare.fairShare" -}}
{{- if and (include "gpushare.withExtender" .) (has .Values.extender.fairShare.mode (list "dispatch" "reclaim")) }}yes{{ end -}}
{{- end }}

{{/* kube-scheduler's percentageOfNodesToScore. With less than 100 the extender must be able to nominate pods, and the guard restricts the
right to patch their status. A second scheduler has the extender's account, so the guard would restrict it too. */}}
{{- define "gpushare.nodesToScore" -}}
{{- if and (include "gpushare.withExtender" .) (not (include "gpushare.secondScheduler" .)) .Values.guard.enabled (include "gpushare.hasPolicies" .) }}
{{- int .Values.scheduler.percentageOfNodesToScore }}{{ else }}100{{ end -}}
{{- end }}

{{/* Not empty if pods are nominated to nodes that kube-scheduler doesn't offer. */}}
{{- define "gpushare.nominates" -}}
{{- if lt (int (include "gpushare.nodesToScore" .)) 100 }}yes{{ end -}}
{{- end }}

{{/* Not empty if this release has the extender. */}}
{{- define "gpushare.withExtender" -}}
{{- if ne .Values.mode "devicePlugin" }}yes{{ end -}}
{{- end }}

{{/* The label's value with which nodes choose this release's device plugin. A node has one value, so no two releases select it. */}}
{{- define "gpushare.nodeLabel" -}}
{{- if include "gpushare.withExtender" . }}true{{ else }}{{ include "gpushare.fullname" . }}{{ end -}}
{{- end }}

{{/* The selector of the nodes that share their cards. */}}
{{- define "gpushare.cardNodes" -}}
{{- if eq .Values.devicePlugin.nodes "labelled" -}}
gpushare: {{ include "gpushare.nodeLabel" . | quote }}
{{- else -}}
feature.node.kubernetes.io/pci-10de.present: "true"
{{- end }}
{{- with .Values.devicePlugin.nodeSelector }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A node selector requirement that keeps a pod off nodes on which NVIDIA's GPU operator replaces the driver; the argument is a list of its states.
The module can't be unloaded while a program has NVML open. A DaemonSet's pod is deleted when its node doesn't match any more. */}}
{{- define "gpushare.noDriverUpgrade" -}}
key: nvidia.com/gpu-driver-upgrade-state
operator: NotIn
values: {{ toYaml . | nindent 2 }}
{{- end }}

{{/* The annotations with which a container gets the driver library and every card by CDI; the argument is (list . container). */}}
{{- define "gpushare.driverAnnotations" -}}
{{- if eq (index . 0).Values.devicePlugin.driverAccess "cdi" -}}
cdi.k8s.io/gpushare: nvidia.com/gpu=all
nvidia.cdi.k8s.io/container.{{ index . 1 }}: nvidia.com/gpu=all
{{- end -}}
{{- end }}

{{/* Not empty if the device plugin's cards don't exist. */}}
{{- define "gpushare.simulated" -}}
{{- if and .Values.devicePlugin.enabled (gt (int .Values.devicePlugin.simulatedCards.count) 0) }}yes{{ end -}}
{{- end }}

{{/* Not empty if a pod of this release has an image of a release that isn't published. */}}
{{- define "gpushare.unpublishedImages" -}}
{{- $images := list -}}
{{- if include "gpushare.withExtender" . }}{{ $images = append $images .Values.images.extender }}{{ end -}}
{{- if include "gpushare.simulated" . -}}
{{- $images = append $images .Values.images.simulatedDevicePlugin -}}
{{- else if .Values.devicePlugin.enabled -}}
{{- $images = append $images .Values.images.devicePlugin -}}
{{- end -}}
{{- if and (index .Chart.Annotations "gpushare.aliyun.com/unreleased") (not .Values.imageRegistry) -}}
{{- range $images }}{{ if hasPrefix "ghcr.io/gpushare/" .repository }}yes{{ end }}{{ end -}}
{{- end -}}
{{- end }}

{{/* The simulated cards of a node, as lines for the fake driver library: UUID, model, memory in MiB, NUMA node. */}}
{{- define "gpushare.simulatedCards" -}}
{{- with .Values.devicePlugin.simulatedCards -}}
{{- $memory := regexFind "^[0-9]+" .memory | mul (ternary 1024 1 (hasSuffix "Gi" .memory)) -}}
{{- $lines := list -}}
{{- range $index := until (int .count) -}}
{{- $lines = append $lines (printf "GPU-simulated-$(NODE_NAME)-%d, %s, %d, -" $index $.Values.devicePlugin.simulatedCards.model $memory) -}}
{{- end -}}
{{ join "\n" $lines }}
{{- end -}}
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
