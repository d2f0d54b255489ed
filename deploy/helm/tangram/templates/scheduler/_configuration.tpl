{{- define "tangram.schedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: {{ .Values.scheduler.leaderElect }}
  resourceLock: leases
  resourceName: {{ include "tangram.scheduler" . }}
  resourceNamespace: {{ include "tangram.namespace" . }}
  leaseDuration: {{ .Values.scheduler.leaseDurationSeconds }}s
  renewDeadline: {{ div (mul 2 (int .Values.scheduler.leaseDurationSeconds)) 3 }}s
  retryPeriod: {{ max 1 (div (int .Values.scheduler.leaseDurationSeconds) 8) }}s
# all nodes: the scheduler's sample would hide the node that fits best, or the only one that fits
percentageOfNodesToScore: 100
profiles:
  - schedulerName: {{ .Values.scheduler.name }}
{{ include "tangram.extenders" . }}
{{- end -}}
