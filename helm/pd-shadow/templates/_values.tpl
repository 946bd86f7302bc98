{{/* Puts values of old names where they are now, and defaults where a null took them away: Helm reads a key without
     content, such as `gateway:` above comments, as an order to delete. Every template begins with it, since the order of
     templates is Helm's. */}}
{{- define "pd-shadow.values" -}}
{{- range $old, $new := .Files.Get "renamed.yaml" | fromYaml }}
{{- include "pd-shadow.renamed.within" (dict "values" $.Values "old" (splitList "." $old) "new" (splitList "." $new)) }}
{{- end }}
{{- range $path, $default := .Files.Get "defaults.json" | fromJson }}
{{- $values := $.Values }}
{{- $keys := splitList "." $path }}
{{- range initial $keys }}{{ $values = get $values . }}{{ end }}
{{- if not (hasKey $values (last $keys)) }}{{ $_ := set $values (last $keys) $default }}{{ end }}
{{- end }}
{{- end -}}

{{- define "pd-shadow.renamed.within" -}}
{{- $values := .values }}
{{- $key := first .old }}
{{- if kindIs "map" $values }}
{{- if gt (len .old) 1 }}
{{- range $inner := ternary (keys $values) (list $key) (eq $key "*") }}
{{- include "pd-shadow.renamed.within" (dict "values" (get $values $inner) "old" (rest $.old) "new" $.new) }}
{{- end }}
{{- else if hasKey $values $key }}
{{- $given := get $values $key }}
{{- $content := dict (last .new) $given }}
{{- range reverse (initial .new) }}{{ $content = dict . $content }}{{ end }}
{{- $_ := mergeOverwrite $values $content }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What NOTES.txt says of old names in use: (dict "values" .Values "old" (list …) "at" "" "new" "…"). */}}
{{- define "pd-shadow.renamed.warnings" -}}
{{- $values := .values }}
{{- $key := first .old }}
{{- if kindIs "map" $values }}
{{- if gt (len .old) 1 }}
{{- range $inner := ternary (keys $values | sortAlpha) (list $key) (eq $key "*") }}
{{- include "pd-shadow.renamed.warnings" (dict "values" (get $values $inner) "old" (rest $.old) "at" (printf "%s%s." $.at $inner) "new" $.new) }}
{{- end }}
{{- else if hasKey $values $key }}
WARNING: {{ .at }}{{ $key }} has another name now, {{ .at }}{{ .new }}; rename it: the next minor release refuses it.
{{- end }}
{{- end }}
{{- end -}}
