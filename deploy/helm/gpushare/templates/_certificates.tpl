{{/*
The certificates of mode "generated", as JSON: of the CA, the extender and kube-scheduler. They are created once and then
read from the Secrets of the release, unless the extender's address has changed.
*/}}
{{- define "gpushare.certificates" -}}
{{- $fullname := include "gpushare.fullname" . -}}
{{- $mine := lookup "v1" "Secret" .Release.Namespace (printf "%s-extender-tls" $fullname) -}}
{{- $theirs := lookup "v1" "Secret" .Release.Namespace (printf "%s-scheduler-tls" $fullname) -}}
{{- $made := "" -}}
{{- if and $mine $theirs -}}
{{- $made = dig "metadata" "annotations" "gpushare.aliyun.com/address" "" $mine -}}
{{- end -}}
{{- if and $made (eq $made .address) -}}
{{- dict "ca" (index $mine.data "ca.crt")
  "extender" (dict "crt" (index $mine.data "tls.crt") "key" (index $mine.data "tls.key"))
  "scheduler" (dict "crt" (index $theirs.data "tls.crt") "key" (index $theirs.data "tls.key")) | toJson -}}
{{- else -}}
{{- $name := printf "%s-extender.%s.svc" $fullname .Release.Namespace -}}
{{- /* ECDSA: a handshake with RSA keys takes both sides several times as long, and kube-scheduler opens many connections. */}}
{{- $ca := genCAWithKey "gpushare" 3650 (genPrivateKey "ecdsa") -}}
{{- $extender := genSignedCertWithKey $name (list .address) (list $name) 3650 $ca (genPrivateKey "ecdsa") -}}
{{- $scheduler := genSignedCertWithKey "kube-scheduler" nil nil 3650 $ca (genPrivateKey "ecdsa") -}}
{{- dict "ca" ($ca.Cert | b64enc)
  "extender" (dict "crt" ($extender.Cert | b64enc) "key" ($extender.Key | b64enc))
  "scheduler" (dict "crt" ($scheduler.Cert | b64enc) "key" ($scheduler.Key | b64enc)) | toJson -}}
{{- end -}}
{{- end }}
