{{/* A duration in the schema's format, in milliseconds. */}}
{{- define "gpushare.milliseconds" -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|s|m)" . -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $sum = addf $sum (mulf (trimSuffix $unit . | float64) (get (dict "ms" 1 "s" 1000 "m" 60000) $unit)) -}}
{{- end -}}
{{ $sum }}
{{- end }}

{{/* Refuses durations that the extender would reject at its start, or that exceed kube-scheduler's timeout. */}}
{{- define "gpushare.checkTimes" -}}
{{- $e := .Values.extender -}}
{{- $hold := include "gpushare.milliseconds" $e.gangHold | float64 -}}
{{- $patience := include "gpushare.milliseconds" $e.gangPatience | float64 -}}
{{- $bind := include "gpushare.milliseconds" $e.bindTimeout | float64 -}}
{{- if or (eq $bind 0.0) (gt $bind 60000.0) -}}
{{- fail (printf "extender.bindTimeout: %s isn't above 0s, and 1m at most" $e.bindTimeout) -}}
{{- end -}}
{{- if gt $hold 60000.0 -}}
{{- fail (printf "extender.gangHold: %s is above 1m" $e.gangHold) -}}
{{- end -}}
{{- if and $e.nativeGroups (eq $hold 0.0) -}}
{{- fail "extender.nativeGroups: groups are off with extender.gangHold=0s" -}}
{{- end -}}
{{- /* Fair sharing needs it too, with groups off. */ -}}
{{- if eq $patience 0.0 -}}
{{- fail (printf "extender.gangPatience: %s must be above 0s, also with groups off (extender.gangHold=0s): fair sharing needs it" $e.gangPatience) -}}
{{- end -}}
{{- if and (gt $hold 0.0) (lt $patience $hold) -}}
{{- fail (printf "extender.gangPatience: %s lies below extender.gangHold (%s): places would be given up before the first hold is over" $e.gangPatience $e.gangHold) -}}
{{- end -}}
{{- if ge (addf $hold $bind) (include "gpushare.milliseconds" .Values.scheduler.httpTimeout | float64) -}}
{{- fail (printf "scheduler.httpTimeout: %s isn't above extender.gangHold and extender.bindTimeout together (%s, %s): kube-scheduler would give up on binds that go on" .Values.scheduler.httpTimeout $e.gangHold $e.bindTimeout) -}}
{{- end -}}
{{- /* If extraArgs set another renew deadline, the extender itself checks the durations. */ -}}
{{- $elected := or (include "gpushare.byService" .) (include "gpushare.secondScheduler" .) -}}
{{- if and $elected (ge $bind 10000.0) (not (contains "--leader-elect-renew-deadline" (join " " $e.extraArgs))) -}}
{{- fail (printf "extender.bindTimeout: %s isn't below 10s, for which a leader counts on its Lease: lower it, or raise --leader-elect-renew-deadline and --leader-elect-lease-duration in extender.extraArgs" $e.bindTimeout) -}}
{{- end -}}
{{- end }}

{{/*
A leader needs up to twice --bind-timeout and five seconds to resolve unconfirmed binds, and seven more to release the Lease
and end.
*/}}
{{- define "gpushare.gracePeriod" -}}
{{- include "gpushare.milliseconds" .Values.extender.bindTimeout | float64 | mulf 0.002 | addf 12 | ceil -}}
{{- end }}
