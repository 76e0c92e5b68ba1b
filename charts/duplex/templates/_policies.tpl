{{/* Egress to name servers. */}}
{{- define "duplex.toNames" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}

{{/* Egress to the ledger: from any namespace. */}}
{{- define "duplex.toLedger" -}}
{{- if .Values.trialLedger.enabled -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .Release.Namespace | quote }}
      podSelector:
        matchLabels:
          {{- include "duplex.selector" (dict "root" . "part" "ledger") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 6379}
{{- else -}}
{{ include "duplex.toAddresses" .Values.networkPolicy.externalLedger }}
{{- end }}
{{- end }}

{{/* Egress to the API server. */}}
{{- define "duplex.toApiServer" -}}
{{ include "duplex.toAddresses" .Values.networkPolicy.apiServer }}
{{- end }}

{{- define "duplex.toAddresses" -}}
- ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ int . }}}
    {{- end }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The pods of every pool, as a peer. */}}
{{- define "duplex.sidecarPeer" -}}
- namespaceSelector: {}
  podSelector:
    matchLabels:
      {{- include "duplex.sidecarSelector" . | nindent 6 }}
{{- end }}

{{/* A part of this release, as a peer seen from any namespace. */}}
{{- define "duplex.partPeer" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .root.Release.Namespace | quote }}
  podSelector:
    matchLabels:
      {{- include "duplex.selector" . | nindent 6 }}
{{- end }}

{{/* Ingress for whoever reads metrics: (dict "root" . "port" 8080). */}}
{{- define "duplex.fromMetrics" -}}
{{- with .root.Values.networkPolicy.metricsFrom }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ $.port }}}
{{- end }}
{{- end }}
