{{/* Labels of every object of this release. */}}
{{- define "duplex.labels" -}}
app.kubernetes.io/name: duplex
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "duplex.ledgerName" -}}
{{ printf "%s-ledger" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels that tell the trial ledger's pod from others. */}}
{{- define "duplex.ledgerSelector" -}}
app.kubernetes.io/name: duplex
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: ledger
{{- end }}
