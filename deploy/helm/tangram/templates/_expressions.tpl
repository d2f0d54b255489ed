{{/* Keys that the device plugin writes on its node: Names.inventory, .bursts, .numa and .node_labels in vgpu/api/names.py. As lists by comma, and in CEL. */}}
{{- define "tangram.nodeAnnotations" -}}
{{- $domain := .Values.domain -}}
{{- range $at, $name := list "inventory" "bursts" "numa" }}{{ if $at }},{{ end }}{{ $domain }}/{{ $name }}{{ end -}}
{{- end -}}
{{- define "tangram.nodeLabels" -}}
{{- $domain := .Values.domain -}}
{{- range $at, $fact := list "model" "count" "memory" "driver" "cuda" "mig.capable" "arch" }}{{ if $at }},{{ end }}{{ $domain }}/gpu.{{ $fact }}{{ end }},{{ $domain }}/mig.config.state
{{- end -}}
{{/* Key of the taint that the device plugin writes on its node: Names.unhealthy_taint. */}}
{{- define "tangram.nodeTaint" -}}
{{ .Values.domain }}/gpu-unhealthy
{{- end -}}
{{/* Key of the taint that a node group sets on new nodes, and that the device plugin removes: Names.startup_taint. */}}
{{- define "tangram.startupTaint" -}}
{{ .Values.domain }}/not-ready
{{- end -}}
{{- define "tangram.cel.nodeAnnotations" -}}
['{{ include "tangram.nodeAnnotations" . | replace "," "', '" }}']
{{- end -}}
{{- define "tangram.cel.nodeLabels" -}}
['{{ include "tangram.nodeLabels" . | replace "," "', '" }}']
{{- end -}}

{{/* CEL. `object` is a pod. */}}

{{/* Containers of the pod, init containers too. */}}
{{- define "tangram.cel.containers" -}}
(object.spec.containers + object.spec.?initContainers.orValue([]))
{{- end -}}

{{/* Does container `c` request a resource of Tangram? */}}
{{- define "tangram.cel.containerRequestsGpu" -}}
(c.?resources.?limits.orValue({}).exists(k, k.startsWith('{{ .Values.domain }}/')) || c.?resources.?requests.orValue({}).exists(k, k.startsWith('{{ .Values.domain }}/')))
{{- end -}}

{{/* Does a container of the pod? */}}
{{- define "tangram.cel.podRequestsGpu" -}}
{{ include "tangram.cel.containers" . }}.exists(c, {{ include "tangram.cel.containerRequestsGpu" . }})
{{- end -}}

{{/* Does the pod request a share? */}}
{{- define "tangram.cel.podRequestsShare" -}}
{{ include "tangram.cel.containers" . }}.exists(c, '{{ .Values.domain }}/gpu-mem' in c.?resources.?limits.orValue({}))
{{- end -}}

{{/* May container `c` leave the limits of a share? The capabilities are those of vgpu/api/confinement.py. */}}
{{- define "tangram.cel.leavesLimits" -}}
(c.?securityContext.?privileged.orValue(false) || c.?securityContext.?procMount.orValue('') == 'Unmasked' || c.?securityContext.?capabilities.?add.orValue([]).exists(k, k.upperAscii().matches('^(CAP_)?(ALL|BPF|DAC_READ_SEARCH|SYS_ADMIN|SYS_MODULE|SYS_RAWIO)$')))
{{- end -}}

{{/* May a pod with a share mount nothing at a path? Call with the CEL of the path. The pattern is that of vgpu/api/mount_paths.py, for a path
     without empty parts and dots. */}}
{{- define "tangram.cel.refusedPath" -}}
('/' + {{ . }}.split('/').filter(part, !(part in ['', '.'])).join('/')).matches(r'^(?s:(?:.*/)?\.\.(?:/.*)?|/|/etc|/etc/ld\.so\.preload(?:/.*)?|/\.tangram(?:/.*)?|(?:/var)?/run/tangram(?:/.*)?|/proc/[^/]+/.*)$')
{{- end -}}

{{/* A quantity, rounded down: asInteger refuses 8.5Gi. Call with the CEL of the text. */}}
{{- define "tangram.cel.number" -}}
int(quantity({{ . }}).asApproximateFloat())
{{- end -}}

{{/* A quantity of memory in MiB, as gpu-mem is read. Call with (list $ "CEL of the text"). */}}
{{- define "tangram.cel.mib" -}}
{{- $number := include "tangram.cel.number" (index . 1) -}}
({{ $number }} >= 1048576 ? {{ $number }} / 1048576 : {{ $number }} * {{ get (dict "1Gi" 1024 "512Mi" 512 "256Mi" 256) (index . 0).Values.memoryUnit }})
{{- end -}}

{{/* Is a text a whole positive quantity, below 1e15? Call with the CEL of the text. */}}
{{- define "tangram.cel.whole" -}}
(isQuantity({{ . }}) && quantity({{ . }}).asApproximateFloat() >= 1.0 && quantity({{ . }}).asApproximateFloat() < 1e15 && double({{ include "tangram.cel.number" . }}) == quantity({{ . }}).asApproximateFloat())
{{- end -}}

{{/* Is annotation `k` of a burst for container `c`? A container's own replaces the pod's. */}}
{{- define "tangram.cel.burstOf" -}}
(k.matches('/gpu-(mem|core)-burst[.]') ? k.endsWith('.' + c.name) : !((k + '.' + c.name) in variables.annotations))
{{- end -}}

{{/* Is annotation `k` one that only Tangram writes on pods? */}}
{{- define "tangram.cel.ownAnnotation" -}}
(k == '{{ .Values.domain }}/assignment' || k.startsWith('{{ .Values.domain }}/gpus.'))
{{- end -}}

{{/* User names of Tangram's components and of the trusted users, as a CEL list. Call with (list $ "component" ...). */}}
{{- define "tangram.cel.users" -}}
{{- $root := index . 0 -}}
{{- $users := list -}}
{{- range rest . }}{{ $users = append $users (include "tangram.user" (list $root .)) }}{{ end -}}
{{- range $root.Values.policy.trustedUsers }}{{ $users = append $users . }}{{ end -}}
['{{ join "', '" $users }}']
{{- end -}}
