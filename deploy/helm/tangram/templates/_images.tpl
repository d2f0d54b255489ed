{{/* Images, and the version of kube-scheduler. */}}

{{/* Call with (list $ image defaultTag). */}}
{{- define "tangram.imageOf" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := default $image.registry $root.Values.global.imageRegistry -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}{{ printf "%s@%s" $name $image.digest }}
{{- else -}}{{ printf "%s:%s" $name (default (index . 2) $image.tag) }}
{{- end -}}
{{- end -}}

{{- define "tangram.image" -}}{{ include "tangram.imageOf" (list . .Values.image .Chart.AppVersion) }}{{- end -}}

{{/* A name without a host, as the default is, is one of Docker Hub's: the registry of all images has a copy under the same name. */}}
{{- define "tangram.testImage" -}}
{{- $host := regexFind "^([^/]+[.:][^/]*|localhost)/" .Values.test.image -}}
{{- if and .Values.global.imageRegistry (not $host) }}{{ .Values.global.imageRegistry }}/{{ end }}{{ .Values.test.image }}
{{- end -}}

{{/* Secrets for pulling images, of the chart and of all charts. */}}
{{- define "tangram.imagePullSecrets" -}}
{{- with concat .Values.imagePullSecrets (.Values.global.imagePullSecrets | default list) | uniq }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* The cluster's version as a tag of kube-scheduler's image. Providers append to the version (v1.34.1-gke.2, v1.34.1+k3s1); upstream's images have only the first
     part. `helm template --kube-version 1.34` gives v1.34 or v1.34.0, by helm's version: a first release, which nobody runs, gives way to the newest patch. */}}
{{- define "tangram.clusterVersion" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- $minor := regexFind "^v[0-9]+[.][0-9]+" $version -}}
{{- $patch := regexFind "^v[0-9]+[.][0-9]+[.][0-9]+" $version | trimPrefix $minor | trimPrefix "." | default "0" -}}
{{- if eq $patch "0" -}}
{{- range .Values.scheduler.kubeScheduler.patches -}}
{{- if hasPrefix (printf "%s." $minor) . }}{{ $patch = trimPrefix (printf "%s." $minor) . }}{{ end -}}
{{- end -}}
{{- end -}}
{{ $minor }}.{{ $patch }}
{{- end -}}

{{- define "tangram.kubeSchedulerImage" -}}
{{ include "tangram.imageOf" (list . .Values.scheduler.kubeScheduler.image (include "tangram.clusterVersion" .)) }}
{{- end -}}

{{/* Minor version of the kube-scheduler that is installed, such as 36. Empty: its image does not say. */}}
{{- define "tangram.kubeSchedulerMinor" -}}
{{- $image := .Values.scheduler.kubeScheduler.image -}}
{{- $tag := $image.tag -}}
{{- if and (not $tag) (not $image.digest) -}}{{- $tag = include "tangram.clusterVersion" . -}}{{- end -}}
{{- regexReplaceAll "^v?1[.]([0-9]+)([.+-].*)?$" (regexFind "^v?1[.][0-9]+([.+-].*)?$" $tag) "${1}" -}}
{{- end -}}
