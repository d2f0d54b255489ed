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

{{/* What happens to processes that go around the library. */}}
{{- define "tangram.bypass" -}}
{{- if ne .Values.arbiter.bypass "auto" -}}{{ .Values.arbiter.bypass }}
{{- else -}}{{ ternary "kill" "report" .Values.node.hostPID }}
{{- end -}}
{{- end -}}

{{/* Call with (list $ image defaultTag). */}}
{{- define "tangram.imageOf" -}}
{{- $image := index . 0 -}}
{{- $name := ternary (printf "%s/%s" $image.registry $image.repository) $image.repository (ne $image.registry "") -}}
{{- if $image.digest -}}{{ printf "%s@%s" $name $image.digest }}
{{- else -}}{{ printf "%s:%s" $name (default (index . 1) $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "tangram.image" -}}{{ include "tangram.imageOf" (list .Values.image .Chart.AppVersion) }}{{- end -}}

{{/* Providers append to the version (v1.34.1-gke.2, v1.34.1+k3s1); upstream's images have only the first part. */}}
{{- define "tangram.kubeSchedulerImage" -}}
{{- $version := regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{ include "tangram.imageOf" (list .Values.scheduler.kubeScheduler.image $version) }}
{{- end -}}

{{/* Where the pods of a node run: beside its GPUs. */}}
{{- define "tangram.nodePlacement" -}}
{{- with .Values.node.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.node.affinity }}
affinity:
  {{- toYaml .Values.node.affinity | nindent 2 }}
{{- else if .Values.node.requireGpuLabel }}
affinity:
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

{{/* A pod and a container at the level `restricted`. */}}
{{- define "tangram.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}
{{- define "tangram.restrictedContainer" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Replicas on different nodes, where there are several. Call with (list $ "component" affinity). */}}
{{- define "tangram.affinity" -}}
{{- if index . 2 -}}
{{ toYaml (index . 2) }}
{{- else -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "tangram.selector" (list (index . 0) (index . 1)) | nindent 12 }}
{{- end -}}
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
    value: {{ .Release.Namespace }}/{{ include "tangram.scheduler" . }}-preempted
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
startupProbe: # all nodes and pods are listed
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 1
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 2
resources:
  {{- toYaml .Values.scheduler.extender.resources | nindent 2 }}
securityContext:
  {{- include "tangram.restrictedContainer" . | nindent 2 }}
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

{{/* What must not be, in sentences. The schema has the rest. */}}
{{- define "tangram.check" -}}
{{- if not .Values.node.hostPID -}}
{{- if has .Values.arbiter.bypass (list "kill" "evict") -}}
{{- fail (printf "arbiter.bypass is %s with node.hostPID=false: the arbiter does not see the node's processes, so it could not attribute them to containers; it must be auto or report" .Values.arbiter.bypass) -}}
{{- end -}}
{{- if has .Values.arbiter.guard.policy (list "kill" "evict") -}}
{{- fail (printf "arbiter.guard.policy is %s with node.hostPID=false: the arbiter does not see the node's processes, so it could not attribute them to containers; it must be report" .Values.arbiter.guard.policy) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.arbiter.bypass "evict") (not .Values.policy.enabled) -}}
{{- fail "arbiter.bypass is evict with policy.enabled=false: nothing would keep the device plugin from deleting pods of other nodes, so it has no right to; it must be auto, report or kill" -}}
{{- end -}}
{{- if and (eq .Values.arbiter.guard.policy "evict") (not .Values.policy.enabled) -}}
{{- fail "arbiter.guard.policy is evict with policy.enabled=false: nothing would keep the device plugin from deleting pods of other nodes, so it has no right to; it must be report or kill" -}}
{{- end -}}
{{- if and (include "tangram.evictsStranded" .) (not .Values.policy.enabled) -}}
{{- fail "burst.stranded is evict with policy.enabled=false: nothing would keep the device plugin from evicting pods of other nodes, so it has no right to; it must be keep" -}}
{{- end -}}
{{- if and (ne .Values.node.unhealthyGpuPods "leave") (not .Values.policy.enabled) -}}
{{- fail (printf "node.unhealthyGpuPods is %s with policy.enabled=false: nothing would keep the device plugin from evicting pods of other nodes, so it has no right to; it must be leave" .Values.node.unhealthyGpuPods) -}}
{{- end -}}
{{- if and .Values.node.migOnDemand (ne (include "tangram.privileged" .) "true") -}}
{{- fail "node.privileged is false with node.migOnDemand=true: the driver lets only a privileged container change MIG instances; it must be auto or true" -}}
{{- end -}}
{{- if and .Values.node.migConfigMap (ne (include "tangram.privileged" .) "true") -}}
{{- fail (printf "node.privileged is false with node.migConfigMap=%s: the driver lets only a privileged container change MIG instances; it must be auto or true" .Values.node.migConfigMap) -}}
{{- end -}}
{{- if and .Values.node.migModeIdleSeconds (not .Values.node.migConfigMap) -}}
{{- fail (printf "node.migModeIdleSeconds is %v without node.migConfigMap: no layout says which GPUs shall have MIG mode; it must be 0" .Values.node.migModeIdleSeconds) -}}
{{- end -}}
{{- if ge (float64 .Values.scheduler.preemption.deadlineSeconds) (float64 .Values.scheduler.extender.httpTimeoutSeconds) -}}
{{- fail (printf "scheduler.preemption.deadlineSeconds is %v: kube-scheduler waits for scheduler.extender.httpTimeoutSeconds (%v) and would never hear the answer; it must be less, or 0" .Values.scheduler.preemption.deadlineSeconds .Values.scheduler.extender.httpTimeoutSeconds) -}}
{{- end -}}
{{- if and (not .Values.scheduler.leaderElect) (gt (int .Values.scheduler.replicas) 1) -}}
{{- fail (printf "scheduler.replicas is %d with scheduler.leaderElect=false: several active schedulers would give one GPU away twice; it must be 0 or 1" (int .Values.scheduler.replicas)) -}}
{{- end -}}
{{- if and .Values.scheduler.kubeScheduler.featureGates.GenericWorkload (.Capabilities.APIVersions.Has "v1/Pod") -}}
{{- /* "v1/Pod" is among them only if a cluster was read. */ -}}
{{- $served := false -}}
{{- range .Capabilities.APIVersions -}}
{{- if regexMatch "^scheduling[.]k8s[.]io/[^/]+/PodGroup$" . -}}{{- $served = true -}}{{- end -}}
{{- end -}}
{{- if not $served -}}
{{- fail "scheduler.kubeScheduler.featureGates has GenericWorkload=true, and the API server serves no PodGroups: kube-scheduler would wait for them and schedule no pod; turn the gate on in the API server first (docs/tasks/gangs.md)" -}}
{{- end -}}
{{- end -}}
{{- if not (has .Values.webhook.placement.default .Values.webhook.placement.policies) -}}
{{- fail (printf "webhook.placement.default is %s: pods that name no policy would be denied; it must be one of webhook.placement.policies, which are %s" .Values.webhook.placement.default (join ", " .Values.webhook.placement.policies)) -}}
{{- end -}}
{{- if and .Values.burst.hugepages .Values.burst.hostPool -}}
{{- if mod (include "tangram.mib" .Values.burst.hostPool | int64) 2 -}}
{{- fail (printf "burst.hostPool is %s with burst.hugepages=true: it must be a multiple of 2Mi, the size of a page" .Values.burst.hostPool) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.test.image (eq .Values.test.namespace .Release.Namespace) -}}
{{- fail (printf "test.namespace is %s, the release's own: the webhook leaves it out, so pods there get no share; it must be another" .Values.test.namespace) -}}
{{- end -}}
{{- end -}}

{{/* What there is of ours on a node, as paths there. */}}
{{- define "tangram.nodeFiles" -}}
{{ .Values.stateRoot }}{{ if eq (include "tangram.accessMode" .) "cdi" }} {{ .Values.cdiDir }}/tangram.sh-gpu.json{{ end }}
{{- end -}}
