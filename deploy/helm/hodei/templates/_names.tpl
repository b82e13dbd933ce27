{{/* The namespace of everything that has one. */}}
{{- define "hodei.namespace" -}}
{{- default .Release.Namespace .Values.namespace -}}
{{- end -}}

{{/* What all objects carry. */}}
{{- define "hodei.labels" -}}
app.kubernetes.io/name: hodei
{{- end -}}

{{/* What picks the scheduler's pods. */}}
{{- define "hodei.pods" -}}
app.kubernetes.io/name: hodei
app.kubernetes.io/component: scheduler
{{- end -}}

{{/* Whom the roles are given to. */}}
{{- define "hodei.subjects" -}}
- kind: ServiceAccount
  name: hodei
  namespace: {{ include "hodei.namespace" . }}
{{- end -}}
