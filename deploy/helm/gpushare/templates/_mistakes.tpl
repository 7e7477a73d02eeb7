{{/*
Mistakes in single values. The schema doesn't check their format, because its message would be a regular expression. The output
has one line per mistake, with an example of a correct value.
*/}}
{{- define "gpushare.invalidValues" -}}
{{- $v := .Values -}}
{{- $duration := list "^([0-9]+(\\.[0-9]+)?(ms|s|m))+$" "a duration needs a number and a unit (ms, s or m), such as 10s or 1m30s" -}}
{{- $long := list "^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$" "a duration needs a number and a unit (ms, s, m or h), such as 5m" -}}
{{- $positive := list "^([0-9]+(\\.[0-9]+)?(ms|s|m|h))*([0-9]*[1-9][0-9]*(\\.[0-9]+)?|[0-9]+\\.[0-9]*[1-9][0-9]*)(ms|s|m|h)([0-9]+(\\.[0-9]+)?(ms|s|m|h))*$" "a duration needs a number above 0 and a unit (ms, s, m or h), such as 5m" -}}
{{- $directory := list "^(/[A-Za-z0-9._@:+~-]+)+$" "a directory is an absolute path without a slash at its end, such as /var/lib/kubelet" -}}
{{- $unit := list "^([1-9][0-9]*)?(MiB|GiB)$" "the unit is GiB, MiB, or a whole number of either, such as 256MiB" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- $address := printf "^(%s(\\.%s){3}|[0-9a-f]{1,4}:[0-9a-f:]*:[0-9a-f]{0,4})?$" $octet $octet -}}
{{- $object := list "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$" "an object's name consists of at most 253 lower-case letters, digits, - and ., such as my-name" -}}
{{- $rows := list
  (list "extender.gangHold" $v.extender.gangHold $duration)
  (list "extender.gangPatience" $v.extender.gangPatience $duration)
  (list "extender.bindTimeout" $v.extender.bindTimeout $duration)
  (list "scheduler.httpTimeout" $v.scheduler.httpTimeout $duration)
  (list "extender.fairShare.by" $v.extender.fairShare.by (list "^(namespace|label:([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)$" "give namespace, or label: and the key of a label of namespaces, such as label:team"))
  (list "extender.fairShare.reclaimAfter" $v.extender.fairShare.reclaimAfter $positive)
  (list "extender.fairShare.minRuntime" $v.extender.fairShare.minRuntime $long)
  (list "monitoring.interval" $v.monitoring.interval $duration)
  (list "devicePlugin.memoryUnit" $v.devicePlugin.memoryUnit $unit)
  (list "devicePlugin.simulatedCards.memory" $v.devicePlugin.simulatedCards.memory (list "^[1-9][0-9]{0,6}(Mi|Gi)$" "a card's memory is a whole number of Mi or Gi, such as 16Gi"))
  (list "devicePlugin.simulatedCards.model" $v.devicePlugin.simulatedCards.model (list "^[A-Za-z0-9][A-Za-z0-9 ._/()-]{0,93}$" "a model consists of at most 94 letters, digits, spaces and ._/()-, such as NVIDIA H200"))
  (list "mps.sharedMemory" $v.mps.sharedMemory (list "^[1-9][0-9]*(Ki|Mi|Gi)$" "a size is a whole number of Ki, Mi or Gi, such as 1Gi"))
  (list "devicePlugin.maxUnavailable" $v.devicePlugin.maxUnavailable (list "^([1-9][0-9]*|([1-9][0-9]?|100)%)$" "give a number of nodes above 0, such as 1, or a share of them, such as 10%"))
  (list "devicePlugin.devicePluginDirectory" $v.devicePlugin.devicePluginDirectory $directory)
  (list "devicePlugin.podResourcesDirectory" $v.devicePlugin.podResourcesDirectory $directory)
  (list "scheduler.certificateFolder" $v.scheduler.certificateFolder $directory)
  (list "scheduler.kubeconfig" $v.scheduler.kubeconfig (list "^(/[A-Za-z0-9._@:+~-]+)+$" "give the absolute path of a file, such as /etc/kubernetes/scheduler.conf"))
  (list "extender.service.clusterIP" $v.extender.service.clusterIP (list $address "give a free IP address of the Service range, such as 10.96.0.15"))
  (list "extender.ui.listenAddress" $v.extender.ui.listenAddress (list "^([0-9A-Za-z.:%[\\]-]*:[0-9]+)?$" "give an address with a port, such as 127.0.0.1:12346, or :8080 for all addresses"))
  (list "imageRegistry" $v.imageRegistry (list "^([A-Za-z0-9.-]+(:[0-9]+)?(/[A-Za-z0-9._-]+)*)?$" "give a registry without a scheme and without a slash at its end, such as registry.example.com:5000/mirror"))
  (list "extender.priorityClassName" $v.extender.priorityClassName $object)
  (list "devicePlugin.priorityClassName" $v.devicePlugin.priorityClassName $object)
  (list "devicePlugin.runtimeClassName" $v.devicePlugin.runtimeClassName $object)
  (list "extender.tls.secretName" $v.extender.tls.secretName $object)
  (list "monitoring.credentials.name" $v.monitoring.credentials.name $object)
  (list "monitoring.credentials.key" $v.monitoring.credentials.key (list "^[A-Za-z0-9._-]+$" "a Secret's key consists of letters, digits, -, _ and ., such as token"))
  (list "secondScheduler.name" $v.secondScheduler.name (list "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$" "a scheduler's name consists of lower-case letters, digits, - and ., such as gpushare-scheduler"))
-}}
{{- range $name, $image := $v.images -}}
{{- $rows = concat $rows (list
  (list (printf "images.%s.repository" $name) $image.repository (list "^[A-Za-z0-9._-]+(:[0-9]+)?(/[A-Za-z0-9._-]+)*$" "give an image's name without a tag, such as registry.example.com/gpushare-extender"))
  (list (printf "images.%s.tag" $name) $image.tag (list "^[A-Za-z0-9_.-]*$" "a tag consists of letters, digits, _, . and -, such as v0.1.0"))
  (list (printf "images.%s.digest" $name) $image.digest (list "^(sha256:[0-9a-f]{64})?$" "a digest is sha256: and 64 hexadecimal digits, as the registry shows it"))) -}}
{{- end -}}
{{- $name := list "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" "a configuration's name is the value of a label: at most 63 letters, digits, -, _ and ., such as workstations" -}}
{{- range $key, $config := $v.devicePlugin.config.map -}}
{{- $rows = append $rows (list "devicePlugin.config.map" $key $name) -}}
{{- $path := printf "devicePlugin.config.map.%s" $key -}}
{{- $rows = append $rows (list (printf "%s.memoryUnit" $path) (dig "memoryUnit" "GiB" ($config | default dict)) $unit) -}}
{{- $rows = append $rows (list (printf "%s.healthChecks.quietPeriod" $path) (dig "healthChecks" "quietPeriod" "5m" ($config | default dict)) $long) -}}
{{- end -}}
{{- range $i, $path := $v.devicePlugin.cdiDirectories -}}
{{- $rows = append $rows (list (printf "devicePlugin.cdiDirectories[%d]" $i) $path $directory) -}}
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

{{/* Values that are valid, but not for this release or not together. */}}
{{- define "gpushare.wrongCombinations" -}}
{{- $v := .Values -}}
{{- $fullname := include "gpushare.fullname" . -}}
{{- /* The words are no strings in YAML. */}}
{{- if or (not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $fullname)) (gt (len $fullname) 40) (has $fullname (list "true" "false" "null" "yes" "no" "on" "off" "y" "n")) }}
fullnameOverride: the objects' names would begin with {{ quote $fullname }}: give at most 40 lower-case letters, digits and -, begin with a letter, and use no word such as true or off: for example pool-b
{{- end -}}
{{- range $part := list "extender" "devicePlugin" "mps" -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/component" -}}
{{- if hasKey (index $v $part "podLabels" | default dict) $key }}
{{ $part }}.podLabels: {{ $key }} is the chart's own label, by which it finds the pods: choose another key, such as team
{{- end -}}
{{- end -}}
{{- end -}}
{{- $strategy := $v.extender.updateStrategy | default dict -}}
{{- if and $strategy (ne (get $strategy "type") "Recreate") (or (eq $v.mode "secondScheduler") (eq $v.extender.reach "host")) }}
extender.updateStrategy: with extender.reach=host and mode=secondScheduler the old pod must end before the new one starts: leave it empty
{{- end -}}
{{- if dig "rollingUpdate" "maxSurge" 0 ($v.devicePlugin.updateStrategy | default dict) }}
devicePlugin.updateStrategy: with maxSurge two plugins of a node would take the kubelet from each other: set maxUnavailable instead, such as {rollingUpdate: {maxUnavailable: 10%}}
{{- end -}}
{{- with $v.devicePlugin.config -}}
{{- $default := .default | toString -}}
{{- if and (or .map $default) (not (hasKey (.map | default dict) $default)) }}
devicePlugin.config.default: {{ quote $default }} is none of devicePlugin.config.map ({{ keys (.map | default dict) | sortAlpha | join ", " }}): name the configuration of nodes without the label gpushare.aliyun.com/config, such as standard, with standard: {} in the map
{{- end -}}
{{- end -}}
{{- if and (eq $v.extender.overusePolicy "evict") (not $v.extender.allowEvictions) }}
extender.overusePolicy: evict needs the right to evict: set extender.allowEvictions=true
{{- end -}}
{{- if and (eq $v.extender.overusePolicy "evict") (or (not $v.guard.enabled) (not (include "gpushare.hasPolicies" .))) }}
extender.overusePolicy: evict believes an annotation of pods, which without the guard tenants can write: set guard.enabled=true, on Kubernetes 1.30 or later
{{- end -}}
{{- if and (include "gpushare.withExtender" .) (eq $v.extender.overusePolicy "evict") $v.devicePlugin.enabled (not $v.devicePlugin.hostPID) }}
extender.overusePolicy: evict needs the use that the device plugin measures, or no pod is ever evicted: set devicePlugin.hostPID=true
{{- end -}}
{{- if and $v.devicePlugin.enabled $v.devicePlugin.usageMetrics (not $v.devicePlugin.hostPID) }}
devicePlugin.usageMetrics: the device plugin can't tell which container uses the memory: set devicePlugin.hostPID=true
{{- end -}}
{{- if and (include "gpushare.fairShare" .) (or (not $v.guard.enabled) (not (include "gpushare.hasPolicies" .))) }}
extender.fairShare.mode: fair sharing needs the right to patch pods, which the guard restricts to the scheduling gate: set guard.enabled=true, on Kubernetes 1.30 or later
{{- end -}}
{{- if and $v.extender.evictFragmented (not $v.extender.allowEvictions) }}
extender.evictFragmented: it needs the right to evict: set extender.allowEvictions=true
{{- end -}}
{{- if and (eq (toString $v.extender.fairShare.mode) "reclaim") (not $v.extender.allowEvictions) }}
extender.fairShare.mode: reclaim needs the right to evict: set extender.allowEvictions=true
{{- end -}}
{{- if and (or $v.monitoring.enabled $v.monitoring.prometheusRule.enabled) (eq $v.mode "extender") (eq $v.extender.reach "host") }}
monitoring: with extender.reach=host the extender answers on 127.0.0.1 alone, where Prometheus can't reach it: leave monitoring.enabled and monitoring.prometheusRule.enabled off
{{- end -}}
{{- if and (eq $v.devicePlugin.isolation "mps") (not $v.mps.enabled) }}
devicePlugin.isolation: mps needs the MPS daemons: set mps.enabled=true
{{- end -}}
{{- if and $v.mps.enabled (ne $v.devicePlugin.isolation "mps") (not $v.devicePlugin.isolationByLabel) }}
mps.enabled: no node would use the MPS daemons: set devicePlugin.isolation=mps, or devicePlugin.isolationByLabel=true and label nodes
{{- end -}}
{{- if and $v.mps.enabled (eq $v.devicePlugin.isolation "mps") (hasKey ($v.devicePlugin.affinity | default dict) "nodeAffinity") }}
devicePlugin.affinity: with devicePlugin.isolation=mps the chart sets the node affinity of the MPS daemons: use devicePlugin.nodeSelector, or devicePlugin.isolationByLabel=true and label nodes
{{- end -}}
{{- if include "gpushare.simulated" . -}}
{{- $plugin := $v.devicePlugin -}}
{{- $real := dict
  "devicePlugin.isolation" (ne $plugin.isolation "none")
  "devicePlugin.isolationByLabel" $plugin.isolationByLabel
  "devicePlugin.deviceListStrategy" (ne $plugin.deviceListStrategy "envvar")
  "devicePlugin.driverAccess" (ne $plugin.driverAccess "envvar")
  "devicePlugin.runtimeClassName" (ne (toString $plugin.runtimeClassName) "")
  "devicePlugin.nodes" (ne $plugin.nodes "labelled")
  "mps.enabled" $v.mps.enabled -}}
{{- range $name, $config := $plugin.config.map -}}
{{- $_ := set $real (printf "devicePlugin.config.map.%s.isolation" $name) (ne (dig "isolation" "none" ($config | default dict)) "none") -}}
{{- end -}}
{{- range $path, $set := $real -}}
{{- if $set }}
{{ $path }}: it is for real cards: with devicePlugin.simulatedCards leave it at its default
{{- end -}}
{{- end -}}
{{- end -}}
{{- $image := $v.images.scheduler -}}
{{- if and (eq $v.mode "secondScheduler") (not (or $image.tag $image.digest (include "gpushare.kubernetesVersion" .))) }}
images.scheduler.tag: the cluster's version is known only as {{ .Capabilities.KubeVersion.Version }}: give the tag of its kube-scheduler's image, such as {{ .Capabilities.KubeVersion.Version }}.2
{{- end -}}
{{- if eq $v.mode "devicePlugin" -}}
{{- if eq $fullname "gpushare" }}
mode: with mode=devicePlugin the release needs a name of its own, because gpushare is that of the release with the extender: set for example fullnameOverride=pool-b
{{- end -}}
{{- if not $v.devicePlugin.enabled }}
mode: with mode=devicePlugin and devicePlugin.enabled=false nothing is left to install
{{- end -}}
{{- else -}}
{{- with lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "gpushare-extender" -}}
{{- $release := dig "metadata" "annotations" "meta.helm.sh/release-name" "" . -}}
{{- $namespace := dig "metadata" "annotations" "meta.helm.sh/release-namespace" "" . -}}
{{- $installed := dig "metadata" "labels" "app.kubernetes.io/name" $fullname . -}}
{{- if and $release (ne (printf "%s/%s" $namespace $release) (printf "%s/%s" $.Release.Namespace $.Release.Name)) }}
mode: the release {{ $release }} in namespace {{ $namespace }} has the extender, and two extenders would allocate the same memory twice. For a pool of nodes with values of its own set mode=devicePlugin
{{- else if and $release (ne $installed $fullname) }}
fullnameOverride: the names of this release's objects begin with {{ $installed }}, and Helm would create those of {{ $fullname }} beside them: keep the name, or uninstall the release first
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
