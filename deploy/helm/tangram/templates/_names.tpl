{{/* Names and labels. */}}

{{- define "tangram.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tangram.namespace" -}}{{ default .Release.Namespace .Values.namespaceOverride }}{{- end -}}

{{- define "tangram.node" -}}{{ include "tangram.fullname" . }}-node{{- end -}}
{{- define "tangram.pool" -}}{{ include "tangram.fullname" . }}-pool{{- end -}}
{{- define "tangram.scheduler" -}}{{ include "tangram.fullname" . }}-scheduler{{- end -}}
{{- define "tangram.webhook" -}}{{ include "tangram.fullname" . }}-webhook{{- end -}}
{{- define "tangram.cleanup" -}}{{ include "tangram.fullname" . }}-cleanup{{- end -}}
{{- define "tangram.webhookSecret" -}}{{ include "tangram.webhook" . }}-tls{{- end -}}

{{/* What stays the same over a component's life. Call with (list $ "component"). */}}
{{- define "tangram.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "tangram.labels" -}}
{{- $root := index . 0 -}}
{{ include "tangram.selector" . }}
app.kubernetes.io/part-of: tangram
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of a pod. Not the chart's version: an upgrade that changes nothing for a component does not restart it. */}}
{{- define "tangram.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "tangram.selector" . }}
app.kubernetes.io/part-of: tangram
{{- $values := include "tangram.valuesOf" . | fromYaml -}}
{{- with merge (dict) ($values.podLabels | default dict) $root.Values.podLabels $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Call with (list $ .Values.COMPONENT). */}}
{{- define "tangram.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- with merge (dict) (index . 1).podAnnotations $root.Values.podAnnotations -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{/* Values of a component, as YAML. Call with (list $ "node"). */}}
{{- define "tangram.valuesOf" -}}
{{- $root := index . 0 -}}
{{ get (dict "node" $root.Values.node "pool" $root.Values.burst.pool "scheduler" $root.Values.scheduler "webhook" $root.Values.webhook) (index . 1) | default dict | toYaml }}
{{- end -}}

{{/* Labels and annotations of a Deployment or DaemonSet. Call with (list $ "node"). */}}
{{- define "tangram.workloadMetadata" -}}
{{- $values := include "tangram.valuesOf" . | fromYaml -}}
labels:
  {{- include "tangram.labels" . | nindent 2 }}
  {{- with $values.daemonSetLabels | default $values.deploymentLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.daemonSetAnnotations | default $values.deploymentAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name of a component's service account. Call with (list $ "node"). */}}
{{- define "tangram.serviceAccount" -}}
{{- $account := (include "tangram.valuesOf" . | fromYaml).serviceAccount | default dict -}}
{{ $account.name | default (include (printf "tangram.%s" (index . 1)) (index . 0)) }}
{{- end -}}

{{/* User name of a component's service account. Call with (list $ "node"). */}}
{{- define "tangram.user" -}}
{{- $root := index . 0 -}}
system:serviceaccount:{{ include "tangram.namespace" $root }}:{{ include "tangram.serviceAccount" . }}
{{- end -}}
