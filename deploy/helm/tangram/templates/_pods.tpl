{{/* Parts of pods that several components have. */}}

{{/* Where a probe asks is the component's; how often is a value. Call with (list httpGet values). */}}
{{- define "tangram.probe" -}}
httpGet: {{ index . 0 | toJson }}
{{- with index . 1 }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Constraints without a selector are about the component's own pods. Call with (list $ "component" constraints). */}}
{{- define "tangram.topologySpread" -}}
{{- $own := dict "matchLabels" (include "tangram.selector" . | fromYaml) -}}
{{- range index . 2 }}
- {{ set (deepCopy .) "labelSelector" (.labelSelector | default $own) | toYaml | nindent 2 | trim }}
{{- end }}
{{- end -}}

{{/* Root, because the kubelet's folders and everything that a container must not change belong to root. */}}
{{- define "tangram.nodePodSecurity" -}}
{{- $base := dict "runAsUser" 0 "runAsGroup" 0 "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with .Values.node.seLinuxOptions }}{{ $_ := set $base "seLinuxOptions" . }}{{ end -}}
{{ mergeOverwrite $base (deepCopy .Values.node.podSecurityContext) | toYaml }}
{{- end -}}

{{/* Of a container that opens the GPUs' device nodes, which cgroups let no other container do without NVIDIA's container runtime. Call with (list $ securityContext). */}}
{{- define "tangram.deviceSecurity" -}}
{{- $base := include "tangram.confined" . | fromYaml -}}
{{- if eq (include "tangram.privileged" (index . 0)) "true" -}}{{- $base = dict "privileged" true "readOnlyRootFilesystem" true -}}{{- end -}}
{{ mergeOverwrite $base (deepCopy (index . 1)) | toYaml }}
{{- end -}}

{{/* KILL is for processes of other users: the action `kill`, which a pod may request too. */}}
{{- define "tangram.arbiterSecurity" -}}
{{- $base := mergeOverwrite (include "tangram.confined" . | fromYaml) (dict "capabilities" (dict "drop" (list "ALL") "add" (list "KILL"))) -}}
{{ mergeOverwrite $base (deepCopy .Values.node.arbiter.securityContext) | toYaml }}
{{- end -}}

{{- define "tangram.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
