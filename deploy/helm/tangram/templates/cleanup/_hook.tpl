{{/* Made when the rest of the release is gone. Call with the order, as text. */}}
{{- define "tangram.cleanupHook" -}}
helm.sh/hook: post-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
helm.sh/hook-weight: {{ . | quote }}
{{- end }}
