{{/* What must not be, in sentences. The schema has the rest. */}}

{{/* Call with helm's version. 3.14 is the first that has --reset-then-reuse-values, with which the docs upgrade. */}}
{{- define "tangram.checkHelm" -}}
{{- if not (semverCompare ">=3.14.0-0" .) -}}
{{- fail (printf "helm is %s: this chart needs 3.14 or newer" .) -}}
{{- end -}}
{{- end -}}

{{/* `helm upgrade --reuse-values` gives a chart the values of the one before, so whatever is new is missing. This one was new in the first version that checks it. */}}
{{- define "tangram.checkValues" -}}
{{- if not (hasKey .Values "architectures") -}}
{{- fail "architectures has no value: the values of an older chart were used alone; upgrade with --reset-then-reuse-values instead of --reuse-values" -}}
{{- end -}}
{{- end -}}

{{/* Two releases would serve the same GPUs, and refuse each other's writes. `lookup` finds nothing where helm knows no cluster. */}}
{{- define "tangram.checkOtherReleases" -}}
{{- $root := . -}}
{{- range (lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $release := get (.metadata.annotations | default dict) "meta.helm.sh/release-name" -}}
{{- $namespace := get (.metadata.annotations | default dict) "meta.helm.sh/release-namespace" -}}
{{- if and (eq (get $labels "app.kubernetes.io/part-of") "tangram") $release -}}
{{- if or (ne $release $root.Release.Name) (ne $namespace $root.Release.Namespace) -}}
{{- fail (printf "release %s in namespace %s has installed this chart already: two in one cluster would give each GPU away twice; upgrade that one, or uninstall it first" $release $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A component has an account of its own, which exists. */}}
{{- define "tangram.checkAccounts" -}}
{{- $root := . -}}
{{- $seen := dict -}}
{{- range $component := list "node" "pool" "scheduler" "webhook" -}}
{{- $value := ternary "burst.pool" $component (eq $component "pool") -}}
{{- $account := (include "tangram.valuesOf" (list $root $component) | fromYaml).serviceAccount -}}
{{- $name := include "tangram.serviceAccount" (list $root $component) -}}
{{- if and (not $account.create) (not $account.name) -}}
{{- fail (printf "%s.serviceAccount.create is false without a name: its pods would run as the account default, which every pod of the namespace has; set %s.serviceAccount.name" $value $value) -}}
{{- end -}}
{{- if eq $name "default" -}}
{{- fail (printf "%s.serviceAccount.name is default, the account that every pod of the namespace has: all would get its rights; name another" $value) -}}
{{- end -}}
{{- if hasKey $seen $name -}}
{{- fail (printf "%s.serviceAccount.name is %s, as that of %s: each would have the rights of both; name two" $value $name (get $seen $name)) -}}
{{- end -}}
{{- $_ := set $seen $name $value -}}
{{- end -}}
{{- end -}}

{{- define "tangram.checkLabels" -}}
{{- $root := . -}}
{{- range $value, $labels := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "node.podLabels" .Values.node.podLabels "burst.pool.podLabels" .Values.burst.pool.podLabels "scheduler.podLabels" .Values.scheduler.podLabels "webhook.podLabels" .Values.webhook.podLabels -}}
{{- range list "name" "instance" "component" "part-of" -}}
{{- if hasKey $labels (printf "app.kubernetes.io/%s" .) -}}
{{- fail (printf "%s has app.kubernetes.io/%s: the chart finds its own pods by that label; leave it out" $value .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What enforcement needs of the pods on nodes. */}}
{{- define "tangram.checkNodeSecurity" -}}
{{- $contexts := dict "node.podSecurityContext" .Values.node.podSecurityContext "node.plugin.securityContext" .Values.node.plugin.securityContext "node.arbiter.securityContext" .Values.node.arbiter.securityContext "burst.pool.securityContext" .Values.burst.pool.securityContext -}}
{{- range $value, $context := $contexts -}}
{{- if or $context.runAsUser $context.runAsNonRoot -}}
{{- fail (printf "%s has %s: the pods on nodes must run as root, because the kubelet's folders and the grants belong to root; leave it out" $value (ternary (printf "runAsUser=%v" $context.runAsUser) "runAsNonRoot=true" (ne (toString ($context.runAsUser | default "")) ""))) -}}
{{- end -}}
{{- if hasKey $context "privileged" -}}
{{- fail (printf "%s has privileged=%v: node.privileged says whether device plugin and host pool are privileged, and the arbiter, which untrusted processes talk to, never is; leave it out" $value $context.privileged) -}}
{{- end -}}
{{- end -}}
{{- $capabilities := (include "tangram.arbiterSecurity" . | fromYaml).capabilities -}}
{{- if or (not (has "KILL" $capabilities.add)) (has "KILL" $capabilities.drop) -}}
{{- fail "node.arbiter.securityContext.capabilities has no KILL in add: the arbiter could not kill a process that is over its limit (arbiter.bypass, arbiter.guard.policy, the annotation over-limit of a pod); add it" -}}
{{- end -}}
{{- if eq (include "tangram.privileged" .) "true" -}}
{{- range $value := list "node.plugin" "burst.pool" -}}
{{- $context := get $contexts (printf "%s.securityContext" $value) -}}
{{- if eq (toString $context.allowPrivilegeEscalation) "false" -}}
{{- fail (printf "%s.securityContext has allowPrivilegeEscalation=false, and the container is privileged (node.privileged, accessMode): Kubernetes takes only one of the two; leave it out" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A mount over a folder that the components share would hide it from one of them. */}}
{{- define "tangram.checkNodeMounts" -}}
{{- $ours := list .Values.stateRoot (printf "%s/device-plugins" .Values.kubeletDir) (printf "%s/pod-resources" .Values.kubeletDir) .Values.cdiDir "/driver-root" "/numa-nodes" "/kubelet-config" "/pool" "/etc/tangram" "/var/run/secrets/kubernetes.io" -}}
{{- range $value, $mounts := dict "node.plugin.extraVolumeMounts" .Values.node.plugin.extraVolumeMounts "node.arbiter.extraVolumeMounts" .Values.node.arbiter.extraVolumeMounts "burst.pool.extraVolumeMounts" .Values.burst.pool.extraVolumeMounts -}}
{{- range $mount := $mounts -}}
{{- range $folder := $ours -}}
{{- if or (eq (clean $mount.mountPath) $folder) (hasPrefix (printf "%s/" $folder) (clean $mount.mountPath)) -}}
{{- fail (printf "%s mounts %s: that would hide what Tangram has in %s; choose another path" $value $mount.mountPath $folder) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tangram.checkStrategies" -}}
{{- $surge := toString ((.Values.node.updateStrategy.rollingUpdate | default dict).maxSurge | default 0) -}}
{{- if not (has $surge (list "0" "0%")) -}}
{{- fail (printf "node.updateStrategy.rollingUpdate.maxSurge is %s: two device plugins on one node would answer for the same GPUs; it must be 0" $surge) -}}
{{- end -}}
{{- if and (not .Values.scheduler.leaderElect) .Values.scheduler.strategy (ne (.Values.scheduler.strategy.type | default "") "Recreate") -}}
{{- fail "scheduler.strategy is not of type Recreate with scheduler.leaderElect=false: during an upgrade two active schedulers would give one GPU away twice; leave it empty" -}}
{{- end -}}
{{- end -}}

{{- define "tangram.checkCertificate" -}}
{{- with .Values.webhook -}}
{{- if and .tls.secretName .certManager.enabled -}}
{{- fail "webhook.tls.secretName is set with webhook.certManager.enabled=true: only one of them can be the webhook's certificate" -}}
{{- end -}}
{{- if and .tls.caBundle (not .tls.secretName) -}}
{{- fail "webhook.tls.caBundle is set without webhook.tls.secretName: the API server would not trust the certificate that the webhook has otherwise; name the Secret, or leave both empty" -}}
{{- end -}}
{{- if and .tls.secretName (not .tls.caBundle) (not .configurationAnnotations) -}}
{{- fail "webhook.tls.secretName is set without webhook.tls.caBundle: the API server would not trust the webhook, and pods that request GPUs would be refused; set it, or webhook.configurationAnnotations for a controller that writes it" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tangram.check" -}}
{{- include "tangram.checkHelm" .Capabilities.HelmVersion.Version -}}
{{- include "tangram.checkValues" . -}}
{{- include "tangram.checkOtherReleases" . -}}
{{- include "tangram.checkAccounts" . -}}
{{- include "tangram.checkLabels" . -}}
{{- include "tangram.checkNodeSecurity" . -}}
{{- include "tangram.checkNodeMounts" . -}}
{{- include "tangram.checkStrategies" . -}}
{{- include "tangram.checkCertificate" . -}}
{{- range .Values.scheduler.kubeScheduler.extraArgs -}}
{{- if regexMatch "^--?(config|feature-gates)(=|$)" . -}}
{{- fail (printf "scheduler.kubeScheduler.extraArgs has %s: kube-scheduler would not have the chart's configuration, and pods with GPUs would not reach the extender; use scheduler.kubeScheduler.featureGates and the other values of scheduler" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.serviceMonitor -}}
{{- if .scrapeTimeout -}}
{{- if gt (include "tangram.seconds" .scrapeTimeout | int64) (include "tangram.seconds" .interval | int64) -}}
{{- fail (printf "serviceMonitor.scrapeTimeout is %s: Prometheus takes none above serviceMonitor.interval, which is %s" .scrapeTimeout .interval) -}}
{{- end -}}
{{- end -}}
{{- end -}}
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
{{- if and .Values.test.image (eq .Values.test.namespace (include "tangram.namespace" .)) -}}
{{- fail (printf "test.namespace is %s, the release's own: the webhook leaves it out, so pods there get no share; it must be another" .Values.test.namespace) -}}
{{- end -}}
{{- end -}}
