{{/* Puts a policy into force. Call with (list $ "policy"); a third member is the binding's paramRef. */}}
{{- define "tangram.policyBinding" -}}
{{- $root := index . 0 -}}
{{- $name := printf "%s-%s" (include "tangram.fullname" $root) (index . 1) -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  labels:
    {{- include "tangram.labels" (list $root "policy") | nindent 4 }}
spec:
  policyName: {{ $name }}
  validationActions: [Deny]
{{- if gt (len .) 2 }}
  paramRef:
    {{- toYaml (index . 2) | nindent 4 }}
{{- end }}
{{- end -}}
