{{- define "rankscope.name" -}}
{{- $name := ternary .Release.Name (printf "%s-rankscope" .Release.Name) (contains "rankscope" .Release.Name) -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "rankscope.selector" -}}
app.kubernetes.io/name: rankscope
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rankscope.labels" -}}
{{ include "rankscope.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "rankscope.image" -}}
{{ required "image.repository is required: build and push the image first" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* 65534 as in the image; 0 to ask the kubelet. */}}
{{- define "rankscope.uid" -}}
{{ ternary 0 65534 .Values.podAttribution.enabled }}
{{- end -}}
