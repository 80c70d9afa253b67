{{- define "laxity.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "laxity.labels" -}}
app.kubernetes.io/part-of: laxity
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}
