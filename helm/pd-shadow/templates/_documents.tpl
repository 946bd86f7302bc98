{{/* The documents of the processes: what the user set under `config`, and on top what the chart knows. */}}

{{- define "pd-shadow.controller.document" -}}
{{- $doc := deepCopy (.Values.controller.config | default dict) }}
{{- $_ := set $doc "listen" "0.0.0.0:7070" }}
{{- $_ := set $doc "metrics_listen" "0.0.0.0:7071" }}
{{- if .Values.tls.enabled }}
{{- $tls := dict "cert_file" "/etc/pd-shadow/tls/tls.crt" "key_file" "/etc/pd-shadow/tls/tls.key" }}
{{- if .Values.tls.mutual }}{{ $_ := set $tls "client_ca_file" "/etc/pd-shadow/tls/ca.crt" }}{{ end }}
{{- $_ := set $doc "tls" $tls }}
{{- end }}
{{- $auth := dict }}
{{- range $name := list "admin" "gateway" "instance" }}
{{- if (get $.Values.auth (printf "%sToken" $name)).secretName }}
{{- $_ := set $auth (printf "%s_token_file" $name) (printf "/etc/pd-shadow/tokens/%s" $name) }}
{{- end }}
{{- end }}
{{- if $auth }}{{ $_ := set $doc "auth" $auth }}{{ end }}
{{- if include "pd-shadow.elects" . }}
{{- $e := .Values.controller.election }}
{{- $_ := set $doc "election" (dict "enabled" true "lease_name" (printf "%s-controller" (include "pd-shadow.fullname" .)) "namespace" .Release.Namespace "lease_duration_seconds" $e.leaseDurationSeconds "renew_deadline_seconds" $e.renewDeadlineSeconds "retry_period_seconds" $e.retryPeriodSeconds) }}
{{- end }}
{{- if .Values.discovery.kubernetes.enabled }}
{{- $k := dict "enabled" true "namespaces" (fromJsonArray (include "pd-shadow.discovery.namespaces" .)) "label_selector" .Values.discovery.kubernetes.labelSelector }}
{{- $_ := set $doc "discovery" (mergeOverwrite (deepCopy ($doc.discovery | default dict)) (dict "kubernetes" $k)) }}
{{- end }}
{{- toYaml $doc }}
{{- end -}}

{{- define "pd-shadow.gateway.document" -}}
{{- $doc := deepCopy (.Values.gateway.config | default dict) }}
{{- $_ := set $doc "controller" (include "pd-shadow.controller.address" .) }}
{{- $_ := set $doc "listen" "0.0.0.0:8000" }}
{{- with fromYaml (include "pd-shadow.clientTls" .) }}{{ $_ := set $doc "controller_tls" . }}{{ end }}
{{- if .Values.auth.gatewayToken.secretName }}{{ $_ := set $doc "controller_token_file" "/etc/pd-shadow/tokens/gateway" }}{{ end }}
{{- if include "pd-shadow.tls.secret" (dict "root" . "part" "gateway") }}
{{- $_ := set $doc "tls" (dict "cert_file" "/etc/pd-shadow/tls/tls.crt" "key_file" "/etc/pd-shadow/tls/tls.key") }}
{{- end }}
{{- if .Values.auth.apiKeys.secretName }}{{ $_ := set $doc "api_keys_file" "/etc/pd-shadow/tokens/api-keys" }}{{ end }}
{{- toYaml $doc }}
{{- end -}}

{{/* How a client of the controller speaks TLS; empty without TLS. */}}
{{- define "pd-shadow.clientTls" -}}
{{- if .Values.tls.enabled }}
ca_file: /etc/pd-shadow/client-tls/ca.crt
{{- if .Values.tls.mutual }}
cert_file: /etc/pd-shadow/client-tls/tls.crt
key_file: /etc/pd-shadow/client-tls/tls.key
{{- end }}
server_name: {{ include "pd-shadow.controller.host" . }}
{{- end }}
{{- end -}}

{{/* One pool's engine.yaml: (dict "root" $ "key" "small" "model" $model "role" "prefill" "pool" $pool). */}}
{{- define "pd-shadow.engine.document" -}}
{{- $doc := mergeOverwrite (deepCopy (.root.Values.engines.engine | default dict)) (deepCopy (.model.engine | default dict)) (deepCopy (.given.engine | default dict)) }}
{{- $_ := set $doc "model" .model.model }}
{{- $_ := set $doc "served_name" (.model.servedName | default .key) }}
{{- $_ := set $doc "role" .role }}
{{- $_ := set $doc "port" 8000 }}
{{- $_ := set $doc "drain_seconds" (int .pool.drainSeconds) }}
{{- if and (not (hasKey $doc "tensor_parallel_size")) (gt (int .pool.gpus) 0) }}{{ $_ := set $doc "tensor_parallel_size" (int .pool.gpus) }}{{ end }}
{{- if .pool.plugin }}
{{- $doc = merge (fromYaml (include "pd-shadow.engine.access" (dict "root" .root))) $doc }}
{{- $plugin := deepCopy ($doc.plugin | default dict) }}
{{- $_ := set $plugin "metrics_listen" "0.0.0.0:9464" }}
{{- $_ := set $doc "plugin" $plugin }}
{{- else }}
{{- $_ := set $doc "plugin" nil }}
{{- end }}
{{- toYaml $doc }}
{{- end -}}

{{/* What engines of both kinds need to attach, as a mapping: (dict "root" $). */}}
{{- define "pd-shadow.engine.access" -}}
{{- $access := dict "controller" (include "pd-shadow.controller.address" .root) }}
{{- with fromYaml (include "pd-shadow.clientTls" .root) }}{{ $_ := set $access "controller_tls" . }}{{ end }}
{{- if .root.Values.auth.instanceToken.secretName }}{{ $_ := set $access "controller_token_file" "/etc/pd-shadow/tokens/instance" }}{{ end }}
{{- toYaml $access }}
{{- end -}}

{{/* An emulated pool's document, arguments as above and its name. What vLLM's and emulated engines both know is taken
     over from `engine`; --name and --host of the pod come on top. */}}
{{- define "pd-shadow.emulated.document" -}}
{{- $given := mergeOverwrite (deepCopy (.root.Values.engines.engine | default dict)) (deepCopy (.model.engine | default dict)) (deepCopy (.given.engine | default dict)) }}
{{- $engine := pick $given "block_size" "max_model_len" "max_num_batched_tokens" "max_num_seqs" "kv_lease_seconds" "plugin" }}
{{- $_ := set $engine "name" .name }}
{{- $_ := set $engine "model" .model.model }}
{{- $_ := set $engine "served_model_name" (.model.servedName | default .key) }}
{{- $_ := set $engine "role" .role }}
{{- $_ := set $engine "host" "0.0.0.0" }}
{{- $_ := set $engine "port" 8000 }}
{{- $_ := set $engine "speed" (.model.emulated.speed | default 1) }}
{{- $doc := dict "engines" (list $engine) }}
{{- if .pool.plugin }}
{{- $doc = merge $doc (fromYaml (include "pd-shadow.engine.access" (dict "root" .root))) }}
{{- else }}
{{- $_ := set $engine "plugin" nil }}
{{- end }}
{{- toYaml $doc }}
{{- end -}}
