{{/* The extender's container, for its Deployment and for the second scheduler's. */}}
{{- define "gpushare.extenderContainer" -}}
{{- $host := and (eq .Values.mode "extender") (eq .Values.extender.reach "host") -}}
{{- include "gpushare.checkTimes" . -}}
{{- $tls := .Values.extender.tls -}}
{{- if and (include "gpushare.tls" .) (ne $tls.mode "secret") (not (has "kube-scheduler" $tls.clientNames)) -}}
{{- fail (printf "extender.tls.clientNames: with extender.tls.mode=%s the certificate of kube-scheduler has the name kube-scheduler" $tls.mode) -}}
{{- end -}}
name: extender
image: {{ include "gpushare.image" (list . .Values.images.extender .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.images.extender.pullPolicy }}
args:
  {{- if include "gpushare.byService" . }}
  - --listen-address=:12345
  # A separate port: probes and Prometheus have no certificate, and other connections can't block it.
  - --health-address=:12347
  - --leader-elect
  - --leader-elect-namespace={{ .Release.Namespace }}
  - --advertise-address=$(POD_IP)
  {{- with include "gpushare.fullname" . }}
  {{- if ne . "gpushare" }}
  - --publish-service={{ . }}-extender
  {{- end }}
  {{- end }}
  {{- if include "gpushare.tls" . }}
  - --tls-cert-file=/tls/tls.crt
  - --tls-key-file=/tls/tls.key
  - --client-ca-file=/tls/ca.crt
  # The CA may have signed other certificates too.
  - --client-names={{ join "," .Values.extender.tls.clientNames }}
  {{- end }}
  {{- else if $host }}
  - --listen-address=127.0.0.1:12345
  {{- if ne .Release.Namespace "kube-system" }}
  - --leader-elect-namespace={{ .Release.Namespace }}
  {{- end }}
  {{- else }}
  # Only for the scheduler in this pod; probes use the other address.
  - --listen-address=127.0.0.1:12345
  - --health-address=:12347
  # The Lease prevents two pods from binding at the same time, also when a lost node returns.
  - --leader-elect
  - --leader-elect-namespace={{ .Release.Namespace }}
  {{- end }}
  - --card-policy={{ .Values.extender.cardPolicy }}
  - --node-policy={{ .Values.extender.nodePolicy }}
  - --bind-timeout={{ .Values.extender.bindTimeout }}
  - --gang-hold={{ .Values.extender.gangHold }}
  - --gang-patience={{ .Values.extender.gangPatience }}
  - --gang-failure-policy={{ ternary "evict" "keep" .Values.extender.allowEvictions }}
  {{- if include "gpushare.nominates" . }}
  - --percentage-of-nodes-to-score={{ include "gpushare.nodesToScore" . }}
  {{- end }}
  {{- if .Values.extender.nativeGroups }}
  - --native-groups
  {{- end }}
  {{- if .Values.extender.evictFragmented }}
  - --evict-fragmented
  {{- end }}
  {{- if ne .Values.extender.overusePolicy "report" }}
  - --overuse-policy={{ .Values.extender.overusePolicy }}
  {{- end }}
  {{- if include "gpushare.fairShare" . }}
  - --fair-share={{ .Values.extender.fairShare.mode }}
  - --fair-share-by={{ .Values.extender.fairShare.by }}
  - --fair-share-priority-cutoff={{ int64 .Values.extender.fairShare.priorityCutoff }}
  - --fair-share-provisioning={{ int64 .Values.extender.fairShare.provisioning }}
  {{- if eq .Values.extender.fairShare.mode "reclaim" }}
  - --fair-share-reclaim-after={{ .Values.extender.fairShare.reclaimAfter }}
  - --fair-share-min-runtime={{ .Values.extender.fairShare.minRuntime }}
  {{- end }}
  {{- end }}
  {{- if not .Values.extender.ui.enabled }}
  - --ui-listen-address=
  {{- else if .Values.extender.ui.listenAddress }}
  - --ui-listen-address={{ .Values.extender.ui.listenAddress }}
  {{- end }}
  {{- if .Values.monitoring.authorize }}
  - --authorize-metrics
  {{- end }}
  {{- if ne .Values.logFormat "text" }}
  - --logging-format={{ .Values.logFormat }}
  {{- end }}
  - -v={{ .Values.extender.logLevel }}
  {{- range .Values.extender.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- if or (include "gpushare.byService" .) .Values.extender.extraEnv }}
env:
  {{- if include "gpushare.byService" . }}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- end }}
  {{- with .Values.extender.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- if not $host }}
ports:
  {{- if include "gpushare.byService" . }}
  - {name: extender, containerPort: 12345}
  {{- end }}
  - {name: health, containerPort: 12347}
  {{- with include "gpushare.pagePort" . }}
  - {name: ui, containerPort: {{ . }}}
  {{- end }}
{{- end }}
securityContext:
  {{- include "gpushare.restrictedContainer" . | nindent 2 }}
livenessProbe:
  httpGet: {{ ternary "{host: 127.0.0.1, port: 12345, path: /livez}" "{port: health, path: /livez}" $host }}
  periodSeconds: 10
readinessProbe:
  httpGet: {{ ternary "{host: 127.0.0.1, port: 12345, path: /readyz}" "{port: health, path: /readyz}" $host }}
  periodSeconds: 2
resources:
  {{- toYaml .Values.extender.resources | nindent 2 }}
{{- if include "gpushare.tls" . }}
volumeMounts:
  - {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}
