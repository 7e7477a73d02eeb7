{{/*
Checks of values whose message from the schema would be a regular expression. The output has one line per mistake, with an
example of a correct value.
*/}}
{{- define "gpushare.mistakes" -}}
{{- $v := .Values -}}
{{- $duration := list "^([0-9]+(\\.[0-9]+)?(ms|s|m))+$" "a duration needs a number and a unit (ms, s or m), such as 10s or 1m30s" -}}
{{- $directory := list "^/.*[^/]$" "a directory is an absolute path without a slash at its end, such as /var/lib/kubelet" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- $address := printf "^(%s(\\.%s){3}|[0-9a-f]{1,4}:[0-9a-f:]*:[0-9a-f]{0,4})?$" $octet $octet -}}
{{- $rows := list
  (list "extender.gangHold" $v.extender.gangHold $duration)
  (list "extender.gangPatience" $v.extender.gangPatience $duration)
  (list "extender.bindTimeout" $v.extender.bindTimeout $duration)
  (list "scheduler.httpTimeout" $v.scheduler.httpTimeout $duration)
  (list "monitoring.interval" $v.monitoring.interval $duration)
  (list "devicePlugin.memoryUnit" $v.devicePlugin.memoryUnit (list "^([1-9][0-9]*)?(MiB|GiB)$" "the unit is GiB, MiB, or a whole number of either, such as 256MiB"))
  (list "devicePlugin.maxUnavailable" $v.devicePlugin.maxUnavailable (list "^([1-9][0-9]*|([1-9][0-9]?|100)%)$" "give a number of nodes above 0, such as 1, or a share of them, such as 10%"))
  (list "devicePlugin.devicePluginDirectory" $v.devicePlugin.devicePluginDirectory $directory)
  (list "devicePlugin.podResourcesDirectory" $v.devicePlugin.podResourcesDirectory $directory)
  (list "scheduler.certificateFolder" $v.scheduler.certificateFolder $directory)
  (list "scheduler.kubeconfig" $v.scheduler.kubeconfig (list "^/.*[^/]$" "give the absolute path of a file, such as /etc/kubernetes/scheduler.conf"))
  (list "extender.service.clusterIP" $v.extender.service.clusterIP (list $address "give a free IP address of the Service range, such as 10.96.0.15"))
  (list "extender.ui.listenAddress" $v.extender.ui.listenAddress (list "^(.*:[0-9]+)?$" "give an address with a port, such as 127.0.0.1:12346, or :8080 for all addresses"))
  (list "secondScheduler.name" $v.secondScheduler.name (list "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$" "a scheduler's name consists of lower-case letters, digits, - and ., such as gpushare-scheduler"))
-}}
{{- range $name, $image := $v.images -}}
{{- $rows = concat $rows (list
  (list (printf "images.%s.tag" $name) $image.tag (list "^[A-Za-z0-9_.-]*$" "a tag consists of letters, digits, _, . and -, such as v0.1.0"))
  (list (printf "images.%s.digest" $name) $image.digest (list "^(sha256:[0-9a-f]{64})?$" "a digest is sha256: and 64 hexadecimal digits, as the registry shows it"))) -}}
{{- end -}}
{{- range $i, $name := $v.extender.tls.clientNames -}}
{{- $rows = append $rows (list (printf "extender.tls.clientNames[%d]" $i) $name (list "^[A-Za-z0-9]([A-Za-z0-9._:@/-]*[A-Za-z0-9])?$" "give the common name of a client's certificate, such as kube-scheduler")) -}}
{{- end -}}
{{- range $i, $account := $v.guard.allow.serviceAccounts -}}
{{- $rows = append $rows (list (printf "guard.allow.serviceAccounts[%d]" $i) $account (list "^[^/:]+/[^/:]+$" "give namespace and name of the ServiceAccount, such as velero/velero")) -}}
{{- end -}}
{{- range $rows -}}
{{- $value := ternary "" (index . 1 | toString) (kindIs "invalid" (index . 1)) -}}
{{- $format := index . 2 -}}
{{- if not (regexMatch (index $format 0) $value) }}
{{ index . 0 }}: {{ quote $value }} is invalid: {{ index $format 1 }}
{{- end -}}
{{- end -}}
{{- if eq (toString $v.secondScheduler.name) "default-scheduler" }}
secondScheduler.name: default-scheduler is the name of the cluster's own scheduler, which would take the same pods: choose another name, such as gpushare-scheduler
{{- end -}}
{{- end }}
