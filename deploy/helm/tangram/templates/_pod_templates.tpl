{{/* Kinds whose pod templates Kueue counts, and where those are. `[]` after a field: a list of such, `{}`: a map. Read in Kueue 0.19 (pkg/controller/jobs):
     docs/development/kueue.md has files and lines. `queued`: only with a queue's label, because most objects of the kind are no jobs. */}}
{{- define "tangram.countedKinds" -}}
jobs: {group: batch, kind: Job, at: [spec.template]}
jobsets: {group: jobset.x-k8s.io, kind: JobSet, at: ["spec.replicatedJobs[].template.spec.template"]}
rayclusters: {group: ray.io, kind: RayCluster, at: [spec.headGroupSpec.template, "spec.workerGroupSpecs[].template"]}
rayjobs:
  group: ray.io
  kind: RayJob
  at: [spec.rayClusterSpec.headGroupSpec.template, "spec.rayClusterSpec.workerGroupSpecs[].template", spec.submitterPodTemplate]
rayservices:
  group: ray.io
  kind: RayService
  at: [spec.rayClusterConfig.headGroupSpec.template, "spec.rayClusterConfig.workerGroupSpecs[].template"]
pytorchjobs: {group: kubeflow.org, kind: PyTorchJob, at: ["spec.pytorchReplicaSpecs{}.template"]}
tfjobs: {group: kubeflow.org, kind: TFJob, at: ["spec.tfReplicaSpecs{}.template"]}
xgboostjobs: {group: kubeflow.org, kind: XGBoostJob, at: ["spec.xgbReplicaSpecs{}.template"]}
jaxjobs: {group: kubeflow.org, kind: JAXJob, at: ["spec.jaxReplicaSpecs{}.template"]}
paddlejobs: {group: kubeflow.org, kind: PaddleJob, at: ["spec.paddleReplicaSpecs{}.template"]}
mpijobs: {group: kubeflow.org, kind: MPIJob, at: ["spec.mpiReplicaSpecs{}.template"]}
statefulsets: {group: apps, kind: StatefulSet, queued: true, at: [spec.template]}
leaderworkersets:
  group: leaderworkerset.x-k8s.io
  kind: LeaderWorkerSet
  queued: true
  at: [spec.leaderWorkerTemplate.leaderTemplate, spec.leaderWorkerTemplate.workerTemplate]
{{- end -}}

{{/* Are templates normalised? Not empty: yes. MutatingAdmissionPolicy is v1 and on since Kubernetes 1.36; "v1/Pod" is among the APIs only if a cluster was read. */}}
{{- define "tangram.normalises" -}}
{{- $served := or (not (.Capabilities.APIVersions.Has "v1/Pod")) (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") -}}
{{- if and .Values.policy.enabled (eq .Values.queues.kueue.templates "normalise") (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) $served -}}yes{{- end -}}
{{- end -}}

{{/* CEL. Does Kueue count the object by itself? Where the owner is counted, its templates were looked at. */}}
{{- define "tangram.cel.notOfCounted" -}}
{{- $kinds := list "TrainJob" "AppWrapper" "SparkApplication" -}}
{{- range fromYaml (include "tangram.countedKinds" .) }}{{ $kinds = append $kinds .kind }}{{ end -}}
!object.metadata.?ownerReferences.orValue([]).exists(o, o.?controller.orValue(false) && o.kind in ['{{ join "', '" (sortAlpha $kinds) }}'])
{{- end -}}

{{/* CEL. Is it in a queue? Call with the CEL of the object. */}}
{{- define "tangram.cel.inQueue" -}}
({{ . }}.metadata.?labels[?'kueue.x-k8s.io/queue-name'].orValue('') != '')
{{- end -}}

{{/* CEL. Pod specs of an object, of whichever of the kinds it is. Call with the CEL of the object. */}}
{{- define "tangram.cel.templates" -}}
{{- $object := . -}}
{{- $lists := list -}}
{{- $seen := dict -}}
{{- range fromYaml (include "tangram.countedKinds" .) -}}
{{- range .at -}}
{{- if not (hasKey $seen .) -}}
{{- $_ := set $seen . true -}}
{{- $parts := splitList "." . | join ".?" | splitList "[]" -}}
{{- $map := splitList "." . | join ".?" | splitList "{}" -}}
{{- if eq (len $parts) 2 -}}
{{- $lists = append $lists (printf "%s.?%s.orValue([]).map(r, dyn(r%s.?spec.orValue({})))" $object (index $parts 0) (index $parts 1)) -}}
{{- else if eq (len $map) 2 -}}
{{- $all := printf "%s.?%s.orValue({})" $object (index $map 0) -}}
{{- $lists = append $lists (printf "%s.map(k, dyn(%s[k]%s.?spec.orValue({})))" $all $all (index $map 1)) -}}
{{- else -}}
{{- $lists = append $lists (printf "[dyn(%s.?%s.?spec.orValue({}))]" $object (index $parts 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
({{ join " + " $lists }})
{{- end -}}

{{/* CEL. Pod specs of an object of one kind, each as {'path': JSON pointer, 'spec': spec}. Call with the paths of the kind. */}}
{{- define "tangram.cel.templatesAt" -}}
{{- $lists := list -}}
{{- range . -}}
{{- $list := splitList "[]" . -}}
{{- $map := splitList "{}" . -}}
{{- if or (eq (len $list) 2) (eq (len $map) 2) -}}
{{- $parts := ternary $list $map (eq (len $list) 2) -}}
{{- $before := index $parts 0 -}}
{{- $after := index $parts 1 -}}
{{- $key := ternary "string(i)" "i.replace('~', '~0').replace('/', '~1')" (eq (len $list) 2) -}}
{{- $lists = append $lists (printf "object.?%s.orValue(%s).transformList(i, r, {'path': dyn('/%s/' + %s + '%s/spec'), 'spec': dyn(r%s.?spec.orValue({}))})"
      ($before | replace "." ".?") (ternary "[]" "{}" (eq (len $list) 2)) ($before | replace "." "/") $key ($after | replace "." "/") ($after | replace "." ".?")) -}}
{{- else -}}
{{- $lists = append $lists (printf "[{'path': dyn('/%s/spec'), 'spec': dyn(object.?%s.?spec.orValue({}))}]" (. | replace "." "/") (. | replace "." ".?")) -}}
{{- end -}}
{{- end -}}
{{ join " + " $lists }}
{{- end -}}

{{/* CEL. gpu-mem of container `c` under `part` (limits or requests) as text, empty if it has none. A custom resource may have a number. */}}
{{- define "tangram.cel.gpuMem" -}}
string(c.?resources[?part][?'{{ .Values.domain }}/gpu-mem'].orValue(dyn('')))
{{- end -}}

{{/* CEL. Is text `q` a quantity of memory in bytes? SMALLEST_BYTES in vgpu/api/quantity.py. */}}
{{- define "tangram.cel.bytes" -}}
(isQuantity(q) && quantity(q).compareTo(quantity('1Mi')) >= 0)
{{- end -}}

{{/* CEL. Bytes `q` to the nearest whole number, which is exact below 2**50: more than 1048575 units of 1Gi cannot be requested. */}}
{{- define "tangram.cel.nearest" -}}
int(quantity(q).asApproximateFloat() + 0.5)
{{- end -}}

{{/* CEL. Has `q`, which is bytes, a number of units: whole, and at most 1048575 units? As memory_units in vgpu/api/quantity.py. */}}
{{- define "tangram.cel.countable" -}}
(quantity(q).compareTo(quantity('{{ mul 1048575 (include "tangram.mib" .Values.memoryUnit | int64) }}Mi')) <= 0 && quantity(string({{ include "tangram.cel.nearest" . }})).compareTo(quantity(q)) == 0)
{{- end -}}

{{/* CEL. The units of `q`, rounded up, as text. */}}
{{- define "tangram.cel.units" -}}
{{- $unit := mul (include "tangram.mib" .Values.memoryUnit | int64) 1048576 -}}
string(({{ include "tangram.cel.nearest" . }} + {{ sub $unit 1 }}) / {{ $unit }})
{{- end -}}
