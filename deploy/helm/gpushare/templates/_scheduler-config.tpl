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
# From 100 nodes on kube-scheduler looks at a part of the nodes only; binpack wants to see them all.
percentageOfNodesToScore: {{ .Values.scheduler.percentageOfNodesToScore }}
# A pod that was refused is looked at again after so long at the latest, once there is a reason to. The members of a group come
# together only if that is well below the time for which the first one's bind waits (--gang-hold); the default is as long.
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
