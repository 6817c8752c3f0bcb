{{- define "rankscope.name" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "rankscope.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end -}}

{{- define "rankscope.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "rankscope.name" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{- define "rankscope.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rankscope.labels" -}}
{{ include "rankscope.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "rankscope.image" -}}
{{- with .Values.image -}}
{{ required "image.repository is required: build and push the image first" .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{/* uid 0 only to ask the kubelet. */}}
{{- define "rankscope.securityContext" -}}
{{- $root := dict "runAsUser" 0 "runAsGroup" 0 "runAsNonRoot" false -}}
{{ toYaml (ternary (mergeOverwrite (deepCopy .Values.securityContext) $root) .Values.securityContext .Values.podAttribution.enabled) }}
{{- end -}}

{{/* Not empty if the chart installs an analyzer. */}}
{{- define "rankscope.analyzes" -}}
{{- if and .Values.analyzer.enabled (or .Values.analyzer.targets (not .Values.webConfig.secretName)) }}yes{{ end -}}
{{- end -}}

{{- define "rankscope.analyzerSelector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}-analyzer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rankscope.analyzerLabels" -}}
{{ include "rankscope.analyzerSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A stable instance: the alert about an analyzer that is down must not fire after each update. */}}
{{- define "rankscope.analyzerRelabelings" -}}
- {targetLabel: job, replacement: rankscope-analyzer}
- {targetLabel: instance, replacement: {{ include "rankscope.name" . }}-analyzer}
{{- end -}}
