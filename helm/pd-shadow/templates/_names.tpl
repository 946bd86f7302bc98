{{/* Names, labels and images. */}}

{{- define "pd-shadow.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters; a longer one ends in a digest, so that two releases do not get one name. */}}
{{- define "pd-shadow.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name (include "pd-shadow.name" .)) (contains (include "pd-shadow.name" .) .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Labels that select a component's pods: (dict "root" $ "component" "gateway"). */}}
{{- define "pd-shadow.selector" -}}
app.kubernetes.io/name: {{ include "pd-shadow.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object as a mapping; what is the chart's own wins, since selectors go by it. */}}
{{- define "pd-shadow.labels" -}}
{{- $own := fromYaml (include "pd-shadow.selector" .) }}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/part-of" "pd-shadow" }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- merge $own (.labels | default dict) .root.Values.commonLabels | toYaml }}
{{- end -}}

{{/* Metadata of an object: (dict "root" $ "component" "gateway" "name" "…" "annotations" (dict)). */}}
{{- define "pd-shadow.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- include "pd-shadow.labels" . | nindent 2 }}
{{- $annotations := merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image reference: (dict "root" $ "image" .Values.image). */}}
{{- define "pd-shadow.image" -}}
{{- $name := .image.repository -}}
{{- if .image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .image.registry) $name }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Service account of a component: (dict "root" $ "component" "gateway" "account" .Values.gateway.serviceAccount). */}}
{{- define "pd-shadow.account" -}}
{{- if .account.name -}}
{{- .account.name -}}
{{- else if .account.create -}}
{{- printf "%s-%s" (include "pd-shadow.fullname" .root) .component -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "pd-shadow.controller.host" -}}
{{- printf "%s-controller.%s.svc.%s" (include "pd-shadow.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{- define "pd-shadow.controller.address" -}}
{{- printf "%s:%d" (include "pd-shadow.controller.host" .) (int .Values.controller.service.port) -}}
{{- end -}}

{{- define "pd-shadow.gateway.host" -}}
{{- printf "%s-gateway.%s.svc.%s" (include "pd-shadow.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{/* Names of the TLS secrets; empty where there is none. */}}
{{- define "pd-shadow.tls.secret" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.enabled -}}
{{- $given := get $tls (printf "%sSecret" .part) -}}
{{- if $given -}}
{{- $given -}}
{{- else if $tls.certManager.enabled -}}
{{- printf "%s-%s-tls" (include "pd-shadow.fullname" .root) .part -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" where several controllers elect one. */}}
{{- define "pd-shadow.elects" -}}
{{- if and .Values.controller.election.enabled (gt (int .Values.controller.replicas) 1) }}true{{ end -}}
{{- end -}}

{{/* Namespaces that discovery looks at, as JSON. */}}
{{- define "pd-shadow.discovery.namespaces" -}}
{{- .Values.discovery.kubernetes.namespaces | default (list .Release.Namespace) | uniq | toJson -}}
{{- end -}}
