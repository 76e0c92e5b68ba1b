{{/* What the operator does in a namespace that it watches, and nothing else: a test compares this
     with the calls in its code. */}}
{{- define "duplex.operatorRules" -}}
- apiGroups: [duplex.dev]
  resources: [duplexsessions]
  verbs: [delete, get, list, patch, watch]
- apiGroups: [duplex.dev]
  resources: [duplexpools]
  verbs: [list, watch]
- apiGroups: [duplex.dev]
  resources: [duplexpools/status, duplexsessions/status]
  verbs: [patch]
# Asked for where a cluster checks who may block an owner's deletion (pods and Secrets do).
- apiGroups: [duplex.dev]
  resources: [duplexpools/finalizers, duplexsessions/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, get, list, patch]
# Voices: only those of sessions, and only with their label.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}
