{{/* What all pods have in common. */}}

{{/* (dict "root" $ "workload" .Values.gateway "selector" "component labels" "account" "name" "token" false). */}}
{{- define "pd-shadow.pod" -}}
serviceAccountName: {{ .account | quote }}
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .workload.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .workload.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .workload.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .workload.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .workload.affinity }}
affinity:
  {{- toYaml .workload.affinity | nindent 2 }}
{{- else }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- .selector | nindent 14 }}
{{- end }}
{{- with .workload.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Metadata of a pod: (dict "root" $ "component" "…" "workload" … "labels" (dict) "annotations" (dict)). */}}
{{- define "pd-shadow.podMetadata" -}}
labels:
  {{- /* Without versions: a new chart must not restart engines whose settings stay. */}}
  {{- $own := merge (dict) (.labels | default dict) (fromYaml (include "pd-shadow.selector" .)) .root.Values.commonLabels }}
  {{- merge $own (.workload.podLabels | default dict) | toYaml | nindent 2 }}
{{- $annotations := merge (dict) (.annotations | default dict) (.workload.podAnnotations | default dict) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Volumes for tokens: (dict "root" $ "tokens" (dict "admin" .Values.auth.adminToken …)); nothing where none is set. */}}
{{- define "pd-shadow.tokenVolume" -}}
{{- $sources := list }}
{{- range $file, $secret := .tokens }}
{{- if $secret.secretName }}
{{- $item := dict "key" $secret.key "path" $file }}
{{- $sources = append $sources (dict "secret" (dict "name" $secret.secretName "items" (list $item))) }}
{{- end }}
{{- end }}
{{- with $sources -}}
- name: tokens
  projected:
    defaultMode: 288
    sources:
      {{- toYaml . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "pd-shadow.secretVolume" -}}
{{- if .secret -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret | quote }}
    defaultMode: 288
{{- end }}
{{- end -}}

{{/* Seconds until SIGTERM's sender gives up: (dict "workload" … "drain" 25 "path" "gateway"). */}}
{{- define "pd-shadow.grace" -}}
{{- $drain := .drain | float64 | ceil | int }}
{{- $given := .workload.terminationGracePeriodSeconds }}
{{- if kindIs "invalid" $given -}}
{{- add $drain 15 -}}
{{- else -}}
{{- if le (int $given) $drain -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d is not above the drain time of %d s; raise it, or shorten the drain" .path (int $given) $drain) -}}
{{- end -}}
{{- int $given -}}
{{- end -}}
{{- end -}}

{{/* A probe of the controller: (dict "root" $ "service" "liveness"). The kubelet's gRPC probes know no TLS. */}}
{{- define "pd-shadow.controller.probe" -}}
{{- if .root.Values.tls.enabled -}}
exec:
  command:
    - pd-shadow
    - health
    - 127.0.0.1:7070
    - --service={{ .service }}
    - --server-name={{ include "pd-shadow.controller.host" .root }}
    - --ca-file=/etc/pd-shadow/tls/ca.crt
    {{- if .root.Values.tls.mutual }}
    - --cert-file=/etc/pd-shadow/tls/tls.crt
    - --key-file=/etc/pd-shadow/tls/tls.key
    {{- end }}
{{- else -}}
grpc:
  port: 7070
  service: {{ .service }}
{{- end }}
timeoutSeconds: {{ ternary 10 3 .root.Values.tls.enabled }}
{{- end -}}
