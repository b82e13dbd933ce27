{{/* The namespace of all namespaced objects. */}}
{{- define "hodei.namespace" -}}
{{- default .Release.Namespace .Values.namespace -}}
{{- end -}}

{{/* Labels of all objects. */}}
{{- define "hodei.labels" -}}
app.kubernetes.io/name: hodei
{{- end -}}

{{/* Labels that select the scheduler's pods. */}}
{{- define "hodei.pods" -}}
app.kubernetes.io/name: hodei
app.kubernetes.io/component: scheduler
{{- end -}}

{{/* Subjects of the role bindings. */}}
{{- define "hodei.subjects" -}}
- kind: ServiceAccount
  name: hodei
  namespace: {{ include "hodei.namespace" . }}
{{- end -}}
