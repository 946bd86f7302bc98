{{/* Parts of network policies. */}}

{{- define "pd-shadow.dns" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end -}}

{{/* Pods that discovery may find, as peers. */}}
{{- define "pd-shadow.discovered" -}}
{{- range fromJsonArray (include "pd-shadow.discovery.namespaces" .) }}
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ . | quote }}}}
  podSelector: {{ toJson $.Values.discovery.kubernetes.podSelector }}
{{- end }}
{{- end -}}

{{/* From controller and gateway to engines; the ports of engines that are found are their own matter. */}}
{{- define "pd-shadow.toEngines" -}}
{{- if .Values.models -}}
- to: [{podSelector: {matchLabels: {{ include "pd-shadow.selector" (dict "root" . "component" "engine") | fromYaml | toJson }}}}]
  ports: [{port: 8000, protocol: TCP}]
{{- end }}
{{- if .Values.discovery.kubernetes.enabled }}
- to:
    {{- include "pd-shadow.discovered" . | nindent 4 }}
{{- end }}
{{- end -}}

{{/* NIXL's handshake and UCX's ports of all pools of a model: (dict "root" $ "model" $model). */}}
{{- define "pd-shadow.nixlPorts" -}}
{{- $seen := list }}
{{- range $role := list "prefill" "decode" "colocated" }}
{{- if hasKey $.model $role }}
{{- $given := get $.model $role | default dict }}
{{- $engine := mergeOverwrite (deepCopy ($.root.Values.engines.engine | default dict)) (deepCopy ($.model.engine | default dict)) (deepCopy ($given.engine | default dict)) }}
{{- $range := mergeOverwrite (deepCopy $.root.Values.engines.nixlPorts) (deepCopy ($given.nixlPorts | default dict)) }}
{{- $seen = append $seen (printf "{port: %d, protocol: TCP}" (int ($engine.side_channel_port | default 5600))) }}
{{- $seen = append $seen (printf "{port: %d, endPort: %d, protocol: TCP}" (int $range.first) (int $range.last)) }}
{{- end }}
{{- end }}
{{- range uniq $seen }}
- {{ . }}
{{- end }}
{{- end -}}
