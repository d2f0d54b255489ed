{{/* Values that follow from others, and what they must not be. */}}

{{- define "tangram.accessMode" -}}
{{- if ne .Values.accessMode "auto" -}}{{ .Values.accessMode }}
{{- else if .Values.runtimeClassName -}}nvidia
{{- else -}}cdi
{{- end -}}
{{- end -}}

{{/* RuntimeClass that the DaemonSet runs with. */}}
{{- define "tangram.nodeRuntimeClass" -}}
{{- if .Values.runtimeClassName -}}{{ .Values.runtimeClassName }}
{{- else if eq (include "tangram.accessMode" .) "nvidia" -}}nvidia
{{- end -}}
{{- end -}}

{{/* RuntimeClass that the webhook sets in pods that request GPUs. */}}
{{- define "tangram.podRuntimeClass" -}}
{{- if eq (include "tangram.accessMode" .) "nvidia" -}}{{ include "tangram.nodeRuntimeClass" . }}{{- end -}}
{{- end -}}

{{- define "tangram.privileged" -}}
{{- if ne (toString .Values.node.privileged) "auto" -}}{{ .Values.node.privileged }}
{{- else -}}{{ or .Values.node.migOnDemand (ne .Values.node.migConfigMap "") (and (eq (include "tangram.accessMode" .) "cdi") (not (include "tangram.nodeRuntimeClass" .))) }}
{{- end -}}
{{- end -}}

{{/* Does the webhook make its own certificate, and keep it in a Secret? Else somebody else does. */}}
{{- define "tangram.keepsCertificate" -}}{{ not (or .Values.webhook.certManager.enabled .Values.webhook.tls.secretName) }}{{- end -}}

{{/* Two active schedulers would give one GPU away twice: without leader election the old one ends first. */}}
{{- define "tangram.schedulerStrategy" -}}
{{- if .Values.scheduler.strategy }}{{ toYaml .Values.scheduler.strategy }}
{{- else if not .Values.scheduler.leaderElect -}}type: Recreate
{{- end -}}
{{- end -}}

{{/* What happens to processes that go around the library. */}}
{{- define "tangram.bypass" -}}
{{- if ne .Values.arbiter.bypass "auto" -}}{{ .Values.arbiter.bypass }}
{{- else -}}{{ ternary "kill" "report" .Values.node.hostPID }}
{{- end -}}
{{- end -}}

{{/* Where the pods of a node run: beside its GPUs. */}}
{{- define "tangram.nodePlacement" -}}
{{- with .Values.node.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "tangram.onArchitecture" (list . (include "tangram.nodeAffinity" . | fromYaml)) }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
tolerations:
  {{- with .Values.node.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  # the plugin writes this one (`node.unhealthyTaint`)
  - key: {{ include "tangram.nodeTaint" . }}
    operator: Exists
  # the plugin removes this one (`autoscaling.startupTaint`)
  - key: {{ include "tangram.startupTaint" . }}
    operator: Exists
{{- end -}}

{{- define "tangram.nodeAffinity" -}}
{{- if .Values.node.affinity -}}
{{ toYaml .Values.node.affinity }}
{{- else if .Values.node.requireGpuLabel -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
      # Node Feature Discovery: a PCI device of NVIDIA, of class display, 3D, or any
      - matchExpressions:
          - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
      - matchExpressions:
          - {key: feature.node.kubernetes.io/pci-0302_10de.present, operator: In, values: ["true"]}
      - matchExpressions:
          - {key: feature.node.kubernetes.io/pci-0300_10de.present, operator: In, values: ["true"]}
      - matchExpressions:
          - {key: cloud.google.com/gke-accelerator, operator: Exists}
      - matchExpressions:
          - {key: k8s.amazonaws.com/accelerator, operator: Exists}
      - matchExpressions:
          - {key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}
      - matchExpressions:
          - {key: tangram.sh/node, operator: In, values: ["true"]}
{{- end -}}
{{- end -}}

{{/* An affinity that admits only nodes of the image's architectures. Call with (list $ affinity). */}}
{{- define "tangram.onArchitecture" -}}
{{- $affinity := deepCopy (index . 1) -}}
{{- with (index . 0).Values.architectures -}}
{{- $expression := dict "key" "kubernetes.io/arch" "operator" "In" "values" . -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- $required := $node.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
{{- /* A node needs to match one term, so each term gets the expression. */ -}}
{{- $terms := list -}}
{{- range $required.nodeSelectorTerms | default (list dict) -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (append (.matchExpressions | default list) $expression)) .) -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}

{{/* Replicas on different nodes, where there are several. Call with (list $ "component" affinity). */}}
{{- define "tangram.affinity" -}}
{{- $affinity := index . 2 -}}
{{- if not $affinity -}}
{{- $others := dict "matchLabels" (include "tangram.selector" (list (index . 0) (index . 1)) | fromYaml) -}}
{{- $apart := dict "weight" 100 "podAffinityTerm" (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $others) -}}
{{- $affinity = dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $apart)) -}}
{{- end -}}
{{ include "tangram.onArchitecture" (list (index . 0) $affinity) }}
{{- end -}}

{{- define "tangram.resources" -}}
{{- $domain := .Values.domain -}}
{{- $names := list "gpu-mem" "gpu-core" "gpu" -}}
{{- range concat .Values.migProfiles .Values.extraMigProfiles | uniq }}{{ $names = append $names (printf "mig-%s" .) }}{{ end -}}
{{- range $names }}
- name: {{ $domain }}/{{ . }}
  ignoredByScheduler: false
{{- end }}
{{- end -}}

{{/* kube-scheduler's `extenders`. */}}
{{- define "tangram.extenders" -}}
extenders:
  - urlPrefix: http://127.0.0.1:{{ .Values.scheduler.extender.port }}
    filterVerb: filter
    # called for pods of placement policy `scheduler` only: of others one node is left
    prioritizeVerb: prioritize
    bindVerb: bind
    # also where preemption is off: kube-scheduler would evict by node totals, and the extender names no victims
    preemptVerb: preempt
    weight: {{ .Values.scheduler.extender.weight }}
    # the extender has the nodes in its own cache: only their names are sent
    nodeCacheCapable: true
    # no extender, no pod with GPUs: better late than double
    ignorable: false
    httpTimeout: {{ .Values.scheduler.extender.httpTimeoutSeconds }}s
    # Pods that request one of these go through the extender. They stay visible to the scheduler's own accounting: without
    # it, preemption would never see that they are short.
    managedResources:
      {{- include "tangram.resources" . | trim | nindent 6 }}
  {{- with .Values.scheduler.extender.spareWeight }}
  # the same once more, for pods that request none of them: it says where fewest GPUs are left
  - urlPrefix: http://127.0.0.1:{{ $.Values.scheduler.extender.port }}
    prioritizeVerb: spare
    weight: {{ . }}
    nodeCacheCapable: true
    ignorable: true
    httpTimeout: 1s
  {{- end }}
{{- end -}}

{{/* Does the extender keep placeholder pods for autoscalers? "true", or nothing. */}}
{{- define "tangram.placeholders" -}}
{{- if and .Values.scheduler.enabled .Values.autoscaling.placeholders.enabled -}}
{{- if not .Values.policy.enabled -}}
{{- fail "autoscaling.placeholders.enabled is true with policy.enabled=false: nothing would keep the extender from creating other pods than placeholders, so it has no right to; it must be false" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* PriorityClass of placeholder pods. */}}
{{- define "tangram.placeholderClass" -}}
tangram-placeholder
{{- end -}}

{{- define "tangram.extenderContainer" -}}
name: extender
restartPolicy: Always
image: {{ include "tangram.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [tangram-extender]
{{- with .Values.scheduler.extender.extraArgs }}
args:
  {{- toYaml . | nindent 2 }}
{{- end }}
env:
  - name: TANGRAM_EXTENDER_DOMAIN
    value: {{ .Values.domain | quote }}
  - name: TANGRAM_EXTENDER_MEMORY_UNIT
    value: {{ .Values.memoryUnit | quote }}
  - name: TANGRAM_EXTENDER_PORT
    value: {{ .Values.scheduler.extender.port | quote }}
  - name: TANGRAM_EXTENDER_METRICS_PORT
    value: {{ .Values.scheduler.extender.metricsPort | quote }}
  - name: TANGRAM_EXTENDER_BURST_ENABLED
    value: {{ .Values.burst.enabled | quote }}
  {{- with .Values.burst.overcommit }}
  - name: TANGRAM_EXTENDER_BURST_OVERCOMMIT
    value: {{ . | quote }}
  {{- end }}
  - name: TANGRAM_EXTENDER_BIND_TIMEOUT_S
    value: {{ sub (int .Values.scheduler.extender.httpTimeoutSeconds) 1 | quote }}
  - name: TANGRAM_EXTENDER_PREEMPTION
    value: {{ .Values.scheduler.preemption.enabled | quote }}
  - name: TANGRAM_EXTENDER_PREEMPTION_DEADLINE_S
    value: {{ .Values.scheduler.preemption.deadlineSeconds | default (mulf 0.6 .Values.scheduler.extender.httpTimeoutSeconds) | quote }}
  - name: TANGRAM_EXTENDER_PREEMPTION_RESERVATION_S
    value: {{ .Values.scheduler.preemption.reservationSeconds | quote }}
  - name: TANGRAM_EXTENDER_PREEMPTED_TIMES
    value: {{ .Values.scheduler.preemption.timesPerPod | quote }}
  - name: TANGRAM_EXTENDER_PREEMPTED_PERIOD_S
    value: {{ .Values.scheduler.preemption.periodSeconds | quote }}
  {{- if and .Values.scheduler.enabled .Values.scheduler.preemption.enabled }}
  - name: TANGRAM_EXTENDER_PREEMPTED_CONFIG_MAP
    value: {{ include "tangram.namespace" . }}/{{ include "tangram.scheduler" . }}-preempted
  {{- end }}
  {{- if .Values.queues.kueue.enabled }}
  - name: TANGRAM_EXTENDER_KUEUE
    value: "true"
  - name: TANGRAM_EXTENDER_KUEUE_EVICT
    value: {{ .Values.queues.kueue.evict }}
  - name: TANGRAM_EXTENDER_KUEUE_CONTROLLERS
    value: {{ join "," .Values.queues.kueue.controllers | quote }}
  {{- end }}
  {{- if include "tangram.placeholders" . }}
  - name: TANGRAM_EXTENDER_PLACEHOLDER_CONFIG_MAP
    value: {{ .Release.Namespace }}/{{ include "tangram.scheduler" . }}-placeholders
  - name: TANGRAM_EXTENDER_PLACEHOLDER_MOST
    value: {{ .Values.autoscaling.placeholders.max | quote }}
  - name: TANGRAM_EXTENDER_PLACEHOLDER_TIMEOUT_S
    value: {{ include "tangram.seconds" .Values.autoscaling.placeholders.timeout | quote }}
  - name: TANGRAM_EXTENDER_PLACEHOLDER_PRIORITY_CLASS
    value: {{ include "tangram.placeholderClass" . }}
  - name: TANGRAM_EXTENDER_PLACEHOLDER_IMAGE
    value: {{ .Values.autoscaling.placeholders.image | quote }}
  {{- end }}
  - name: TANGRAM_EXTENDER_SCHEDULER_NAME
    value: {{ .Values.scheduler.name | quote }}
  {{- if .Values.scheduler.enabled }}
  - name: TANGRAM_EXTENDER_SCHEDULER_PROCESS
    value: kube-scheduler
  {{- end }}
  - name: TANGRAM_EXTENDER_NOMINATE_AHEAD
    value: {{ .Values.scheduler.nominateAhead | quote }}
  - name: TANGRAM_EXTENDER_LOG_LEVEL
    value: {{ .Values.logLevel }}
  {{- with .Values.scheduler.extender.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: metrics
    containerPort: {{ .Values.scheduler.extender.metricsPort }}
startupProbe:
  {{- include "tangram.probe" (list (dict "path" "/readyz" "port" "metrics") .Values.scheduler.extender.startupProbe) | nindent 2 }}
livenessProbe:
  {{- include "tangram.probe" (list (dict "path" "/healthz" "port" "metrics") .Values.scheduler.extender.livenessProbe) | nindent 2 }}
readinessProbe:
  {{- include "tangram.probe" (list (dict "path" "/readyz" "port" "metrics") .Values.scheduler.extender.readinessProbe) | nindent 2 }}
resources:
  {{- toYaml .Values.scheduler.extender.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.scheduler.extender.securityContext | nindent 2 }}
{{- with .Values.scheduler.extender.extraVolumeMounts }}
volumeMounts:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Is there a host pool? */}}
{{- define "tangram.hasPool" -}}{{ and .Values.burst.enabled (ne .Values.burst.hostPool "") }}{{- end -}}

{{/* MiB of a size such as 64Gi. The schema has its form. */}}
{{- define "tangram.mib" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- mul $number (get (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) (regexFind "[A-Z]i$" .)) -}}
{{- end -}}

{{/* Seconds of a time such as 5m. The schema has its form. */}}
{{- define "tangram.seconds" -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get (dict "s" 1 "m" 60 "h" 3600) (regexFind "[smh]$" .)) -}}
{{- end -}}

{{/* What the pod of the host pool requests of a node, and is limited to. */}}
{{- define "tangram.poolMemory" -}}
{{- $pool := include "tangram.mib" .Values.burst.hostPool | int64 -}}
{{- $overhead := include "tangram.mib" .Values.burst.pool.overhead | int64 -}}
{{- if .Values.burst.hugepages -}}
hugepages-2Mi: {{ $pool }}Mi
memory: {{ $overhead }}Mi
{{- else -}}
memory: {{ add $pool $overhead }}Mi
{{- end -}}
{{- end -}}

{{/* Does the device plugin evict pods whose memory cannot come back? Empty: no. */}}
{{- define "tangram.evictsStranded" -}}
{{- if and .Values.burst.enabled (eq .Values.burst.stranded "evict") -}}yes{{- end -}}
{{- end -}}

{{/* Does the device plugin evict any pods? Empty: no. */}}
{{- define "tangram.evicts" -}}
{{- if or (include "tangram.evictsStranded" .) (ne .Values.node.unhealthyGpuPods "leave") -}}yes{{- end -}}
{{- end -}}

{{/* What there is of ours on a node, as paths there. */}}
{{- define "tangram.nodeFiles" -}}
{{ .Values.stateRoot }}{{ if eq (include "tangram.accessMode" .) "cdi" }} {{ .Values.cdiDir }}/tangram.sh-gpu.json{{ end }}
{{- end -}}
