{{/* Labels of every object of this release. */}}
{{- define "duplex.labels" -}}
app.kubernetes.io/name: duplex
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Name of an object of this release: (dict "root" . "part" "operator"). */}}
{{- define "duplex.name" -}}
{{ printf "%s-%s" (.root.Release.Name | trunc 48 | trimSuffix "-") .part }}
{{- end }}

{{/* Name of a cluster-wide object: two releases of one name, in two namespaces, stay apart. */}}
{{- define "duplex.clusterName" -}}
{{ printf "duplex:%s:%s:%s" .root.Release.Namespace .root.Release.Name .part }}
{{- end }}

{{/* Labels that tell the pods of a part from others. */}}
{{- define "duplex.selector" -}}
app.kubernetes.io/name: duplex
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* What the operator writes on the pods of every pool. */}}
{{- define "duplex.sidecarSelector" -}}
app.kubernetes.io/name: duplex
app.kubernetes.io/component: sidecar
{{- end }}

{{/* Image of operator, gateway and the jobs. */}}
{{- define "duplex.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* Image of a pool's pods that names none. */}}
{{- define "duplex.sidecarImage" -}}
{{ .Values.sidecarImage | default (printf "duplex-sidecar:%s-cuda" .Chart.AppVersion) }}
{{- end }}

{{- define "duplex.ledgerSecret" -}}
{{ if .Values.trialLedger.enabled }}{{ include "duplex.name" (dict "root" . "part" "ledger") }}{{ else }}{{ .Values.externalLedger.urlSecretName }}{{ end }}
{{- end }}

{{/* Port of the gateway's Service: what clients dial inside the cluster. */}}
{{- define "duplex.gatewayPort" -}}
{{ if .Values.gateway.service.port }}{{ int .Values.gateway.service.port }}{{ else if .Values.gateway.tlsSecretName }}443{{ else }}80{{ end }}
{{- end }}

{{/* Address of the gateway inside the cluster. */}}
{{- define "duplex.gatewayServiceUrl" -}}
{{- $tls := ne .Values.gateway.tlsSecretName "" -}}
{{- $port := include "duplex.gatewayPort" . -}}
{{- $host := printf "%s.%s.svc" (include "duplex.name" (dict "root" . "part" "gateway")) .Release.Namespace -}}
{{- if ne $port (ternary "443" "80" $tls) }}{{ $host = printf "%s:%s" $host $port }}{{ end -}}
{{ printf "%s://%s/v1/realtime" (ternary "wss" "ws" $tls) $host }}
{{- end }}

{{/* Address that sessions show to their clients. */}}
{{- define "duplex.gatewayUrl" -}}
{{- if .Values.gateway.externalUrl -}}
{{ .Values.gateway.externalUrl }}
{{- else if .Values.gateway.ingress.enabled -}}
{{ printf "%s://%s/v1/realtime" (ternary "wss" "ws" (ne .Values.gateway.ingress.tlsSecretName "")) .Values.gateway.ingress.host }}
{{- else -}}
{{ include "duplex.gatewayServiceUrl" . }}
{{- end -}}
{{- end }}

{{/*
Where the default pool and the test's session live: a namespace that the operator watches, of those
whose pods are closed off if any are named. The release's own comes before others.
*/}}
{{- define "duplex.homeNamespace" -}}
{{- $named := .Values.networkPolicy.poolNamespaces | default .Values.watchNamespaces | default (list .Release.Namespace) -}}
{{- $watched := list -}}
{{- range $named -}}
{{- if or (empty $.Values.watchNamespaces) (has . $.Values.watchNamespaces) }}{{ $watched = append $watched . }}{{ end -}}
{{- end -}}
{{- $found := $watched | default .Values.watchNamespaces -}}
{{- if has .Release.Namespace $found }}{{ .Release.Namespace }}{{ else }}{{ first $found }}{{ end -}}
{{- end }}

{{- define "duplex.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "duplex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where the pods of a part may run: (dict "root" . "part" "operator" "values" .Values.operator). */}}
{{- define "duplex.scheduling" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "duplex.selector" (dict "root" .root "part" .part) | nindent 8 }}
{{- end }}
{{- end }}

{{- define "duplex.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "duplex.ledgerUrlEnv" -}}
- name: DUPLEX_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "duplex.ledgerSecret" . | quote }}
      key: url
{{- end }}
