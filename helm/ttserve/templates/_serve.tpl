{{/* The served file: read, checked against the worker groups, completed with what only pods know. */}}

{{/* The file as it was given, as YAML. */}}
{{- define "ttserve.file" -}}
{{- $file := dict }}
{{- if .Values.serveConfig }}
  {{- if .Values.serve }}
    {{- fail "serveConfig and serve say the same thing twice: give one of them" }}
  {{- end }}
  {{- $file = fromYaml .Values.serveConfig }}
  {{- with $file.Error }}
    {{- fail (printf "serveConfig is no YAML: %s" .) }}
  {{- end }}
{{- else if .Values.serve }}
  {{- $file = .Values.serve }}
{{- else }}
  {{- $file = fromYaml (.Files.Get "files/demo.yaml") }}
{{- end }}
{{- if ne (len (default (list) $file.applications)) 1 }}
  {{- fail (printf "the served file must have one application, it has %d" (len (default (list) $file.applications))) }}
{{- end }}
{{- if not (dig "args" "pools" (dict) (first $file.applications)) }}
  {{- fail "the served file has no pools: applications[0].args.pools" }}
{{- end }}
{{- toYaml $file }}
{{- end }}

{{/* Groups that are made, by name, each with its defaults filled in, as YAML. */}}
{{- define "ttserve.groups" -}}
{{- $file := fromYaml (include "ttserve.file" .) }}
{{- $served := append (keys (first $file.applications).args.pools) "ingress" }}
{{- $groups := dict }}
{{- range $name, $given := .Values.workers }}
  {{- if $given }}
    {{- $group := mergeOverwrite (deepCopy $.Values.workerDefaults) $given }}
    {{- $roles := list }}
    {{- range $group.roles }}
      {{- if has . $served }}
        {{- $roles = append $roles . }}
      {{- end }}
    {{- end }}
    {{- if and $roles (gt (int $group.replicas) 0) }}
      {{- $_ := set $groups $name (mergeOverwrite $group (dict "roles" $roles)) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- toYaml $groups }}
{{- end }}

{{/* Device nodes that a replica of a pool takes; {devices, board}: (dict "root" $ "role" … "args" …) */}}
{{- define "ttserve.boardsOfPool" -}}
{{- $pool := index .args.pools .role }}
{{- $engine := merge (dict) (default (dict) $pool.engine) (default (dict) .args.engine) }}
{{- $mesh := default (dict) $engine.mesh }}
{{- $known := fromYaml (.root.Files.Get "files/meshes.yaml") }}
{{- $found := dict "devices" 0 "board" "" }}
{{- with $mesh.name }}
  {{- $key := regexReplaceAll "[\\s_-]+" . "" | lower }}
  {{- if hasKey $known $key }}
    {{- $found = index $known $key }}
  {{- end }}
{{- end }}
{{- $asked := dig "TTNPU" "" (default (dict) $pool.resources) }}
{{- toYaml (dict "devices" (ternary $found.devices $asked (eq (toString $asked) "")) "board" $found.board) }}
{{- end }}

{{/* Refuses what cannot fit, with both numbers. Renders nothing. */}}
{{- define "ttserve.check" -}}
{{- $file := fromYaml (include "ttserve.file" .) }}
{{- $args := (first $file.applications).args }}
{{- $groups := fromYaml (include "ttserve.groups" .) }}
{{- $total := 0 }}
{{- $wanted := 0 }}
{{- range $groups }}
  {{- $total = add $total (mul .replicas .numOfHosts .boards.count) }}
  {{- if and (gt (int .boards.count) 0) (eq $.Values.device.mode "none") }}
    {{- fail "a worker group has boards and device.mode is none: set it to dra, plugin or hostPath" }}
  {{- end }}
  {{- if and (gt (int .boards.count) 0) (not .boards.type) }}
    {{- fail "a worker group has boards.count and no boards.type" }}
  {{- end }}
{{- end }}
{{- range $role, $pool := $args.pools }}
  {{- $replicas := int (dig "replicas" 1 $pool) }}
  {{- $need := fromYaml (include "ttserve.boardsOfPool" (dict "root" $ "role" $role "args" $args)) }}
  {{- $wanted = add $wanted (mul $replicas $need.devices) }}
  {{- $names := list }}
  {{- $room := 0 }}
  {{- $cpus := 0.0 }}
  {{- range $name, $group := $groups }}
    {{- if has $role $group.roles }}
      {{- $names = append $names $name }}
      {{- $cpus = addf $cpus (mulf $group.replicas (float64 (include "ttserve.rayCPUs" $group))) }}
      {{- if gt (int $need.devices) 0 }}
        {{- $room = add $room (mul $group.replicas (div $group.boards.count $need.devices)) }}
        {{- if and $need.board $group.boards.type (ne $need.board $group.boards.type) }}
          {{- fail (printf "pool %s needs boards of type %s and workers.%s has %s" $role $need.board $name $group.boards.type) }}
        {{- end }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- if not $names }}
    {{- fail (printf "pool %s has no worker group: none of workers.* with replicas has the role %s" $role $role) }}
  {{- end }}
  {{- if and (gt (int $need.devices) 0) (gt $replicas (int $room)) }}
    {{- fail (printf "pool %s wants %d replicas of %d boards each, and the pods of workers.%s hold %d of them" $role $replicas (int $need.devices) (join ", workers." $names) (int $room)) }}
  {{- end }}
  {{- $cpu := mulf $replicas (float64 (dig "num_cpus" 0.1 $pool)) }}
  {{- if gt $cpu $cpus }}
    {{- fail (printf "pool %s wants %v CPUs of Ray, and the pods of workers.%s have %v: raise their rayCPUs or resources" $role $cpu (join ", workers." $names) $cpus) }}
  {{- end }}
{{- end }}
{{- if and (gt $wanted 0) (gt $wanted $total) }}
  {{- fail (printf "the pools want %d boards, and all worker groups together have %d" (int $wanted) (int $total)) }}
{{- end }}
{{- end }}

{{/* CPUs that Ray counts on a group's pod. */}}
{{- define "ttserve.rayCPUs" -}}
{{- if ne (toString (default "" .rayCPUs)) "" }}
{{- .rayCPUs }}
{{- else }}
{{- $request := toString (dig "requests" "cpu" "1" .resources) }}
{{- if hasSuffix "m" $request }}
{{- max 1 (div (trimSuffix "m" $request | int) 1000) }}
{{- else }}
{{- max 1 (int (float64 $request)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The longest time that a pool lets its requests end. */}}
{{- define "ttserve.drainSeconds" -}}
{{- if ne (toString (default "" .Values.drainSeconds)) "" }}
{{- .Values.drainSeconds }}
{{- else }}
{{- $longest := 0 }}
{{- $file := fromYaml (include "ttserve.file" .) }}
{{- range (first $file.applications).args.pools }}
  {{- $longest = max $longest (ceil (dig "drain_timeout_s" 600 .)) }}
{{- end }}
{{- $longest }}
{{- end }}
{{- end }}

{{/* Ray's resource that pins a role to the groups that have it. */}}
{{- define "ttserve.roleResource" -}}
{{- printf "ttserve_%s" . }}
{{- end }}

{{/* The file as the cluster gets it: the given one, with what only the pods know. */}}
{{- define "ttserve.serveConfigV2" -}}
{{- include "ttserve.check" . }}
{{- $file := fromYaml (include "ttserve.file" .) }}
{{- $groups := fromYaml (include "ttserve.groups" .) }}
{{- $application := first $file.applications }}
{{- $pinned := list }}
{{- range $groups }}
  {{- $pinned = concat $pinned .roles }}
{{- end }}
{{- range $role, $pool := $application.args.pools }}
  {{- $resources := merge (dict (include "ttserve.roleResource" $role) 0.001) (default (dict) $pool.resources) }}
  {{- $_ := set $application.args.pools $role (mergeOverwrite $pool (dict "resources" $resources)) }}
{{- end }}
{{- if has "ingress" $pinned }}
  {{- $ingress := default (dict) $application.args.ingress }}
  {{- $resources := dict (include "ttserve.roleResource" "ingress") 0.001 }}
  {{- $_ := set $application.args "ingress" (mergeOverwrite $ingress (dict "resources" $resources)) }}
{{- end }}
{{- $_ := set $application.args "data_host" "node" }}
{{- $_ := set $application.args "key_file" "/run/secrets/ttserve/keys" }}
{{- $_ := set $file "applications" (list $application) }}
{{- $http := default (dict) $file.http_options }}
{{- $_ := set $file "http_options" (mergeOverwrite $http (dict "host" "0.0.0.0" "port" 8000)) }}
{{- $_ := set $file "proxy_location" "EveryNode" }}
{{- toYaml $file }}
{{- end }}
