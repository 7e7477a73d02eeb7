{{/* kube-scheduler's configuration. Besides the root: address, certificates (mode "generated"). */}}
{{- define "gpushare.schedulerConfig" -}}
{{- $second := include "gpushare.secondScheduler" . -}}
{{- if $second -}}
# Configuration of the second kube-scheduler, with the gpushare extender beside it in the same pod.
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
# By default kube-scheduler scores only a part of the nodes of clusters with 100 nodes or more; binpack needs all of them.
percentageOfNodesToScore: {{ .Values.scheduler.percentageOfNodesToScore }}
# The longest back-off of a rejected pod. It must be well below the time for which the first member's bind of a group waits
# for the others (--gang-hold); kube-scheduler's default is as long as that.
podMaxBackoffSeconds: {{ .Values.scheduler.podMaxBackoffSeconds }}
extenders:
  - urlPrefix: {{ include "gpushare.url" . }}
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    # The scheduler's own scores add up to about 1,200; one of the extender's ten points is worth weight x 10.
    weight: {{ .Values.scheduler.weight }}
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
    # One timeout for all verbs. A bind may wait for the other members of the pod's group (--gang-hold) and then take its
    # time (--bind-timeout): together they must lie below it.
    httpTimeout: {{ .Values.scheduler.httpTimeout }}
    # Node names travel, not nodes: the extender knows the nodes.
    nodeCacheCapable: true
    # Never ignorable: without the extender a pod would be bound without a card.
    ignorable: false
    managedResources:
      # Pods that ask for none of these never reach the extender. The scheduler keeps checking the node's sum itself.
      - name: aliyun.com/gpu-mem
        ignoredByScheduler: false
{{- end }}
