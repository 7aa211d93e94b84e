{{/* The served file: read, checked against the worker groups, completed with the pods' settings. */}}

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

{{/* The application's args. */}}
{{- define "ttserve.args" -}}
{{- (first (fromYaml (include "ttserve.file" .)).applications).args | toYaml }}
{{- end }}

{{/* Defaults of keys that the file leaves out. */}}
{{- define "ttserve.defaults" -}}
{{- .Files.Get "files/defaults.yaml" }}
{{- end }}

{{/* Groups that are made, by name, each with its defaults filled in, as YAML. */}}
{{- define "ttserve.groups" -}}
{{- $served := append (keys (fromYaml (include "ttserve.args" .)).pools) "ingress" }}
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
    {{- $most := int $group.replicas }}
    {{- if and $.Values.autoscaling.enabled (not (kindIs "invalid" $group.maxReplicas)) }}
      {{- $most = int $group.maxReplicas }}
    {{- end }}
    {{- if and $roles (gt $most 0) }}
      {{- $least := ternary $group.replicas $group.minReplicas (kindIs "invalid" $group.minReplicas) }}
      {{- $_ := set $groups $name (mergeOverwrite $group (dict "roles" $roles "least" $least "most" $most)) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- toYaml $groups }}
{{- end }}

{{/* Device nodes of a replica of a pool, its boards' type and hosts: (dict "root" $ "role" … "args" …) */}}
{{- define "ttserve.boardsOfPool" -}}
{{- $pool := default (dict) (index .args.pools .role) }}
{{- $engine := merge (dict) (default (dict) $pool.engine) (default (dict) .args.engine) }}
{{- $known := fromYaml (.root.Files.Get "files/meshes.yaml") }}
{{- $found := dict "devices" 0 "board" "" "hosts" 1 }}
{{- with (default (dict) $engine.mesh).name }}
  {{- $key := regexReplaceAll "[\\s_-]+" . "" | lower }}
  {{- if hasKey $known $key }}
    {{- $found = index $known $key }}
  {{- end }}
{{- end }}
{{- $asked := dig "TTNPU" "" (default (dict) $pool.resources) }}
{{- if ne (toString $asked) "" }}
  {{- $found = dict "devices" $asked "board" $found.board "hosts" 1 }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* CPUs that Ray counts on a group's pod. */}}
{{- define "ttserve.rayCPUs" -}}
{{- if not (kindIs "invalid" .rayCPUs) }}
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

{{/* Bytes of a size like 512Mi. */}}
{{- define "ttserve.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 }}
{{- $unit := regexFind "[KMG]i$" . }}
{{- mul (trimSuffix $unit . | int64) (get $units $unit) }}
{{- end }}

{{/* Bytes of Ray's object store: three quarters of a pod's shared memory, which Ray would exceed. */}}
{{- define "ttserve.objectStoreBytes" -}}
{{- div (mul (include "ttserve.bytes" .) 3) 4 }}
{{- end }}

{{/* The longest time that a pool or an ingress lets its requests end. */}}
{{- define "ttserve.drainSeconds" -}}
{{- if not (kindIs "invalid" .Values.drainSeconds) }}
{{- .Values.drainSeconds }}
{{- else }}
{{- $defaults := fromYaml (include "ttserve.defaults" .) }}
{{- $args := fromYaml (include "ttserve.args" .) }}
{{- $longest := ceil (default 0 (dig "ingress" "drain_timeout_s" 0 $args)) }}
{{- range $args.pools }}
  {{- $longest = max $longest (ceil (dig "drain_timeout_s" $defaults.drain_timeout_s (default (dict) .))) }}
{{- end }}
{{- $longest }}
{{- end }}
{{- end }}

{{/* A request's longest total time in whole seconds: the timeout of proxies before the pods. */}}
{{- define "ttserve.requestSeconds" -}}
{{- $defaults := fromYaml (include "ttserve.defaults" .) }}
{{- ceil (dig "ingress" "request_timeout_s" $defaults.request_timeout_s (fromYaml (include "ttserve.args" .))) | int64 }}
{{- end }}

{{/* Bytes of the largest body. */}}
{{- define "ttserve.maxBodyBytes" -}}
{{- $defaults := fromYaml (include "ttserve.defaults" .) }}
{{- int64 (dig "ingress" "max_body_bytes" $defaults.max_body_bytes (fromYaml (include "ttserve.args" .))) }}
{{- end }}

{{/* "true" if requests need an API key. */}}
{{- define "ttserve.hasApiKeys" -}}
{{- if or .Values.secrets.existingApiKeys (dig "ingress" "api_keys" "" (fromYaml (include "ttserve.args" .))) }}true{{ end }}
{{- end }}

{{/* Number of ingresses: that of the file, but at least one for each ingress pod. A pod without
   a replica has no proxy, and is never ready. */}}
{{- define "ttserve.ingressReplicas" -}}
{{- $defaults := fromYaml (include "ttserve.defaults" .) }}
{{- $pods := 0 }}
{{- range fromYaml (include "ttserve.groups" .) }}
  {{- if has "ingress" .roles }}
    {{- $pods = add $pods (mul .replicas .numOfHosts) }}
  {{- end }}
{{- end }}
{{- max $pods (int (dig "ingress" "replicas" $defaults.ingress_replicas (fromYaml (include "ttserve.args" .)))) }}
{{- end }}

{{/* Ray's resource that pins a role to the groups that have it. */}}
{{- define "ttserve.roleResource" -}}
{{- printf "ttserve_%s" . }}
{{- end }}

{{/* How much of that resource, of which a pod has 1, a replica takes: (dict "root" $ "role" … "replicas" …
   "devices" …). Where several pods have the role each keeps its share of the replicas: else the
   successors of a dead pod's replicas start on another one at once, and the next pod, with none, is
   never ready. One pod alone has room for successors of replicas that drain; boards keep their own share. */}}
{{- define "ttserve.share" -}}
{{- $pods := 0 }}
{{- range fromYaml (include "ttserve.groups" .root) }}
  {{- if has $.role .roles }}
    {{- $pods = add $pods (mul .replicas .numOfHosts) }}
  {{- end }}
{{- end }}
{{- if or (le (int $pods) 1) (gt (int .devices) 0) }}
{{- 0.001 }}
{{- else }}
{{- $each := ceil (divf .replicas $pods) }}
{{- divf (floor (divf 10000 $each)) 10000 }}
{{- end }}
{{- end }}

{{/* The file for the cluster: the given one with the pods' settings. */}}
{{- define "ttserve.serveConfigV2" -}}
{{- include "ttserve.check" . }}
{{- $file := fromYaml (include "ttserve.file" .) }}
{{- $application := first $file.applications }}
{{- $args := $application.args }}
{{- range $role := keys $args.pools }}
  {{- $pool := default (dict) (index $args.pools $role) }}
  {{- $need := fromYaml (include "ttserve.boardsOfPool" (dict "root" $ "role" $role "args" $args)) }}
  {{- $own := dict "root" $ "role" $role "replicas" (dig "replicas" 1 $pool) "devices" $need.devices }}
  {{- $share := include "ttserve.share" $own | float64 }}
  {{- $resources := merge (dict (include "ttserve.roleResource" $role) $share) (default (dict) $pool.resources) }}
  {{- $_ := set $args.pools $role (mergeOverwrite $pool (dict "resources" $resources)) }}
{{- end }}
{{- if ne .Values.device.mode "none" }}
  {{- range append (values $args.pools) $args }}
    {{- $mesh := (default (dict) (default (dict) .).engine).mesh }}
    {{- if and (kindIs "map" $mesh) (not (default (dict) $mesh).weight_cache) }}
      {{- $_ := set $mesh "weight_cache" (printf "%s/weights" (include "ttserve.cacheFolder" $)) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- $ingress := default (dict) $args.ingress }}
{{- $replicas := int (include "ttserve.ingressReplicas" .) }}
{{- $share := include "ttserve.share" (dict "root" . "role" "ingress" "replicas" $replicas "devices" 0) | float64 }}
{{- $resources := merge (dict (include "ttserve.roleResource" "ingress") $share) (default (dict) $ingress.resources) }}
{{- $_ := set $args "ingress" (mergeOverwrite $ingress (dict "resources" $resources "replicas" $replicas)) }}
{{- if .Values.secrets.existingApiKeys }}
  {{- $_ := set $args.ingress "api_keys" (printf "%s/%s" (include "ttserve.apiKeysFolder" .) .Values.secrets.apiKeysName) }}
{{- end }}
{{- if .Values.admin.enabled }}
  {{- $keys := printf "%s/%s" (include "ttserve.adminKeysFolder" .) .Values.admin.keysName }}
  {{- $_ := set $args "admin" (dict "host" "0.0.0.0" "port" 8002 "api_keys" $keys) }}
{{- end }}
{{- $_ := set $args "data_host" "node" }}
{{- $_ := set $args "key_file" (printf "/run/secrets/ttserve/%s" .Values.secrets.keysName) }}
{{- $_ := set $file "applications" (list (mergeOverwrite $application (dict "args" $args))) }}
{{- $http := default (dict) $file.http_options }}
{{- $_ := set $file "http_options" (mergeOverwrite $http (dict "host" "0.0.0.0" "port" 8000)) }}
{{- $_ := set $file "proxy_location" "EveryNode" }}
{{- toYaml $file }}
{{- end }}
