{{/*
"yes" if kube-scheduler needs its configuration: at the installation, and after an upgrade that changes it. Before an upgrade, the cluster has the
former one.
*/}}
{{- define "gpushare.schedulerConfigChanged" -}}
{{- $generated := and (eq "yes" (include "gpushare.tls" .)) (eq .Values.extender.tls.mode "generated") -}}
{{- $address := "" -}}
{{- if include "gpushare.byService" . }}{{ $address = include "gpushare.clusterIP" . }}{{ end -}}
{{- $certificates := dict -}}
{{- if $generated }}{{ $certificates = include "gpushare.certificates" (merge (dict "address" $address) .) | fromJson }}{{ end -}}
{{- $before := lookup "v1" (ternary "Secret" "ConfigMap" $generated) .Release.Namespace (printf "%s-scheduler-config" (include "gpushare.fullname" .)) -}}
{{- $before = dig "data" "scheduler-config.yaml" "" ($before | default dict) -}}
{{- if $generated }}{{ $before = b64dec $before }}{{ end -}}
{{- $now := include "gpushare.schedulerConfig" (merge (dict "address" $address "certificates" $certificates) .) -}}
{{- if ne (trim $before) (trim $now) }}yes{{ end -}}
{{- end }}

{{/* kube-scheduler's configuration. The argument is the root with address and certificates (mode "generated"). */}}
{{- define "gpushare.schedulerConfig" -}}
{{- $second := include "gpushare.secondScheduler" . -}}
{{- if $second -}}
# Configuration of the second kube-scheduler, which runs in one pod with the gpushare extender.
{{- else -}}
# Configuration of kube-scheduler (Kubernetes 1.25 and later) with the gpushare extender. Give it to the scheduler with
# --config. Two values depend on where the scheduler runs: clientConnection.kubeconfig and urlPrefix.
{{- end }}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
{{- if $second }}
leaderElection:
  leaderElect: true
  resourceNamespace: {{ .Release.Namespace }}
  resourceName: gpushare-scheduler
profiles:
  - schedulerName: {{ .Values.secondScheduler.name }}
{{- else }}
clientConnection:
  kubeconfig: {{ .Values.scheduler.kubeconfig }}
{{- end }}
# How many of the nodes that fit a pod kube-scheduler looks for, but at least 100 nodes. The extender has the same value, in
# --percentage-of-nodes-to-score: with less than 100 it nominates pods to other nodes.
percentageOfNodesToScore: {{ include "gpushare.nodesToScore" . }}
# Longest back-off of a rejected pod. It must be well below the time for which a bind waits for the other members of its group
# (--gang-hold), or members miss each other; the default is as long.
podMaxBackoffSeconds: {{ int64 .Values.scheduler.podMaxBackoffSeconds }}
extenders:
  - urlPrefix: {{ include "gpushare.url" . }}
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    # The scheduler's own scores add up to about 1,200; each of the extender's ten points counts weight x 10.
    weight: {{ int64 .Values.scheduler.weight }}
    enableHTTPS: {{ eq "yes" (include "gpushare.tls" .) }}
    {{- if include "gpushare.tls" . }}
    tlsConfig:
      serverName: {{ .address | quote }}
      {{- if eq .Values.extender.tls.mode "generated" }}
      caData: {{ .certificates.ca }}
      certData: {{ .certificates.scheduler.crt }}
      keyData: {{ .certificates.scheduler.key }}
      {{- else }}
      caFile: {{ .Values.scheduler.certificateFolder }}/ca.crt
      certFile: {{ .Values.scheduler.certificateFolder }}/tls.crt
      keyFile: {{ .Values.scheduler.certificateFolder }}/tls.key
      {{- end }}
    {{- end }}
    # One timeout for all verbs. It must be above the sum of --gang-hold, for which a bind waits for the other members of the
    # pod's group, and --bind-timeout, which limits the write.
    httpTimeout: {{ .Values.scheduler.httpTimeout }}
    # Send node names only: the extender has its own cache of nodes.
    nodeCacheCapable: true
    # Must be false: without the extender a pod would be bound without a card.
    ignorable: false
    managedResources:
      # Only pods that request these resources reach the extender. The scheduler itself still checks the node's sum.
      - name: aliyun.com/gpu-mem
        ignoredByScheduler: false
      - name: aliyun.com/gpu-core.percentage
        ignoredByScheduler: false
{{- end }}
