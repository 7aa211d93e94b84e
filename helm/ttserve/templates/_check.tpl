{{/* Refuses values that contradict each other before anything is made, with both numbers. */}}

{{- define "ttserve.check" -}}
{{- $name := include "ttserve.fullname" . }}
{{- if not (regexMatch "^[a-z]" $name) }}
  {{- fail (printf "the release's objects would be called %s, and the name of a Service begins with a letter: set fullnameOverride" $name) }}
{{- end }}
{{- include "ttserve.checkGroups" . }}
{{- include "ttserve.checkPools" . }}
{{- include "ttserve.checkPorts" . }}
{{- include "ttserve.checkUpgrade" . }}
{{- include "ttserve.checkKeys" . }}
{{- include "ttserve.checkApiKeys" . }}
{{- include "ttserve.checkAdmin" . }}
{{- include "ttserve.checkClients" . }}
{{- include "ttserve.checkEnvironment" (dict "where" "extraEnv" "environment" .Values.extraEnv) }}
{{- include "ttserve.checkEnvironment" (dict "where" "workerDefaults.extraEnv" "environment" .Values.workerDefaults.extraEnv) }}
{{- range $name, $group := .Values.workers }}
  {{- include "ttserve.checkEnvironment" (dict "where" (printf "workers.%s.extraEnv" $name) "environment" (default (dict) $group).extraEnv) }}
{{- end }}
{{- end }}

{{/* KubeRay leaves a RAY_AUTH_MODE that a pod has: `disabled` would let every pod that reaches Ray run any program. */}}
{{- define "ttserve.checkEnvironment" -}}
{{- $owned := dict "RAY_AUTH_MODE" "Ray always asks for its token" "RAY_AUTH_TOKEN" "use secrets.existingRayToken" "RAY_AUTH_TOKEN_PATH" "use secrets.existingRayToken" "TTSERVE_OPERATIONS_BIND" "the chart opens port 8001" "TTSERVE_TRUSTED_PROXIES" "use trustedProxies" "TTSERVE_TLS_CERTIFICATE" "probes speak HTTP; end TLS at the Ingress or Gateway" }}
{{- range $variable := .environment }}
  {{- with get $owned $variable.name }}
    {{- fail (printf "%s must not have %s: %s" $.where $variable.name .) }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Ways for outside clients (Ingress, HTTPRoute, load balancer) need a policy that admits them. */}}
{{- define "ttserve.checkClients" -}}
{{- $outside := list }}
{{- if .Values.ingress.enabled }}
  {{- $outside = append $outside "ingress.enabled is true" }}
{{- end }}
{{- if .Values.httpRoute.enabled }}
  {{- $outside = append $outside "httpRoute.enabled is true" }}
{{- end }}
{{- if .Values.inferencePool.enabled }}
  {{- $outside = append $outside "inferencePool.enabled is true" }}
{{- end }}
{{- if ne .Values.service.type "ClusterIP" }}
  {{- $outside = append $outside (printf "service.type is %s" .Values.service.type) }}
{{- end }}
{{- if and $outside .Values.networkPolicy.enabled (not .Values.networkPolicy.clients) }}
  {{- fail (printf "%s, and networkPolicy.clients is empty: name there the namespace of the gateway or ingress controller, or the networks of the clients (ipBlock)" (join " and " $outside)) }}
{{- end }}
{{- end }}

{{/* Each group by itself. */}}
{{- define "ttserve.checkGroups" -}}
{{- $hasIngress := false }}
{{- range $name, $group := fromYaml (include "ttserve.groups" .) }}
  {{- $count := int $group.boards.count }}
  {{- $hasIngress = or $hasIngress (has "ingress" $group.roles) }}
  {{- if and (gt $count 0) (eq $.Values.device.mode "none") }}
    {{- fail (printf "workers.%s has %d boards and device.mode is none: set it to dra, plugin or hostPath" $name $count) }}
  {{- end }}
  {{- if and (gt $count 0) (not $group.boards.type) }}
    {{- fail (printf "workers.%s.boards has count %d and no type" $name $count) }}
  {{- end }}
  {{- if gt (int $group.least) (int $group.most) }}
    {{- fail (printf "workers.%s has minReplicas %d and maxReplicas %d" $name (int $group.least) (int $group.most)) }}
  {{- end }}
{{- end }}
{{- if not $hasIngress }}
  {{- fail "no worker group has the role ingress: add it to the roles of one of workers.*" }}
{{- end }}
{{- if and .Values.device.cache.hostPath .Values.device.cache.claim }}
  {{- fail "device.cache.hostPath and device.cache.claim say the same thing twice: give one of them" }}
{{- end }}
{{- if and .Values.device.cache.hostPath (ne .Values.device.mode "hostPath") }}
  {{- fail (printf "device.cache.hostPath is for device.mode hostPath, and it is %s: Pod Security `restricted` lets no pod have a host's folder; use device.cache.claim" .Values.device.mode) }}
{{- end }}
{{- end }}

{{/* The pools' replicas have pods, boards and CPUs. */}}
{{- define "ttserve.checkPools" -}}
{{- $args := fromYaml (include "ttserve.args" .) }}
{{- $defaults := fromYaml (include "ttserve.defaults" .) }}
{{- $groups := fromYaml (include "ttserve.groups" .) }}
{{- $boards := 0 }}
{{- $cpus := 0.0 }}
{{- range $groups }}
  {{- $boards = add $boards (mul .most .numOfHosts .boards.count) }}
  {{- $cpus = addf $cpus (mulf .most .numOfHosts (float64 (include "ttserve.rayCPUs" .))) }}
{{- end }}
{{- $wantedBoards := 0 }}
{{- $replicas := int (include "ttserve.ingressReplicas" .) }}
{{- $cpu := dig "ingress" "num_cpus" $defaults.num_cpus $args }}
{{- $wantedCPUs := mulf $replicas $cpu }}
{{- include "ttserve.checkRole" (dict "groups" $groups "what" "the ingress" "role" "ingress" "replicas" $replicas "cpu" $cpu "need" (dict "devices" 0)) }}
{{- range $role, $given := $args.pools }}
  {{- $pool := default (dict) $given }}
  {{- $replicas := int (dig "replicas" $defaults.pool_replicas $pool) }}
  {{- $cpu := dig "num_cpus" $defaults.num_cpus $pool }}
  {{- $need := fromYaml (include "ttserve.boardsOfPool" (dict "root" $ "role" $role "args" $args)) }}
  {{- if gt (int $need.hosts) 1 }}
    {{- fail (printf "a mesh of pool %s spans %d hosts, and an engine runs on 1: use a replica for each host" $role (int $need.hosts)) }}
  {{- end }}
  {{- include "ttserve.checkRole" (dict "groups" $groups "what" (printf "pool %s" $role) "role" $role "replicas" $replicas "cpu" $cpu "need" $need) }}
  {{- $wantedBoards = add $wantedBoards (mul $replicas $need.devices) }}
  {{- $wantedCPUs = addf $wantedCPUs (mulf $replicas $cpu) }}
{{- end }}
{{- if gt $wantedBoards $boards }}
  {{- fail (printf "the pools want %d boards, and all worker groups together have %d" $wantedBoards $boards) }}
{{- end }}
{{- if gt $wantedCPUs $cpus }}
  {{- fail (printf "pools and ingress want %v CPUs of Ray, and all worker groups together have %v: raise their rayCPUs or resources" $wantedCPUs $cpus) }}
{{- end }}
{{- end }}

{{/* (dict "groups" … "what" "pool decode" "role" "decode" "replicas" 2 "cpu" 0.1 "need" (dict "devices" … "board" …)) */}}
{{- define "ttserve.checkRole" -}}
{{- $names := list }}
{{- $room := 0 }}
{{- $cpus := 0.0 }}
{{- range $name, $group := .groups }}
  {{- if has $.role $group.roles }}
    {{- $names = append $names $name }}
    {{- $pods := mul $group.most $group.numOfHosts }}
    {{- $cpus = addf $cpus (mulf $pods (float64 (include "ttserve.rayCPUs" $group))) }}
    {{- if gt (int $.need.devices) 0 }}
      {{- $room = add $room (mul $pods (div $group.boards.count $.need.devices)) }}
      {{- if and $.need.board $group.boards.type (ne $.need.board $group.boards.type) }}
        {{- fail (printf "%s needs boards of type %s and workers.%s has %s" $.what $.need.board $name $group.boards.type) }}
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- $where := printf "workers.%s" (join ", workers." $names) }}
{{- if not $names }}
  {{- fail (printf "%s has no worker group: none of workers.* with replicas has the role %s" .what .role) }}
{{- end }}
{{- if and (gt (int .need.devices) 0) (gt .replicas $room) }}
  {{- fail (printf "%s wants %d replicas of %d boards each, and the pods of %s hold %d of them" .what .replicas (int .need.devices) $where $room) }}
{{- end }}
{{- $wanted := mulf .replicas .cpu }}
{{- if gt $wanted $cpus }}
  {{- fail (printf "%s wants %v CPUs of Ray, and the pods of %s have %v: raise their rayCPUs or resources" .what $wanted $where $cpus) }}
{{- end }}
{{- end }}

{{/* Serve's gRPC proxy is the one listener of a pod whose port the file chooses. */}}
{{- define "ttserve.checkPorts" -}}
{{- $ports := dict "6379" "Ray's store" "8000" "the endpoint" "8001" "operations" "8080" "Ray's metrics" "8265" "Ray's dashboard" "8404" "HAProxy's statistics" "8500" "Serve's proxy" "9101" "HAProxy's metrics" "10001" "Ray's clients" "44217" "the autoscaler's metrics" "44227" "the dashboard's metrics" }}
{{- $grpc := toString (dig "grpc_options" "port" 0 (fromYaml (include "ttserve.file" .))) }}
{{- with get $ports $grpc }}
  {{- fail (printf "grpc_options.port %s is the port of %s (%s) in the same pod: choose another" $grpc . $grpc) }}
{{- end }}
{{- end }}

{{- define "ttserve.checkUpgrade" -}}
{{- if eq .Values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" }}
  {{- if not .Values.autoscaling.enabled }}
    {{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade needs autoscaling.enabled: KubeRay refuses it without" }}
  {{- end }}
  {{- if not .Values.upgradeStrategy.gatewayClassName }}
    {{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade needs upgradeStrategy.gatewayClassName" }}
  {{- end }}
{{- end }}
{{- end }}

{{/* With access to the cluster: the Secret must have the key that the engines will read. */}}
{{- define "ttserve.checkKeys" -}}
{{- $name := include "ttserve.keysSecret" . }}
{{- $found := lookup "v1" "Secret" .Release.Namespace $name }}
{{- if $found }}
  {{- if not (hasKey (default (dict) $found.data) .Values.secrets.keysName) }}
    {{- fail (printf "Secret %s has no key %s (secrets.keysName), it has %s: add it first, see docs/kubernetes.md" $name .Values.secrets.keysName (keys (default (dict) $found.data) | sortAlpha | join ", ")) }}
  {{- end }}
{{- else if ne .Values.secrets.keysName "keys" }}
  {{- if not .Values.secrets.existingKeys }}
    {{- fail (printf "secrets.keysName is %s, and the Secret %s that would have it is not there: a first install makes the key `keys`" .Values.secrets.keysName $name) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "ttserve.checkAdmin" -}}
{{- if .Values.admin.enabled }}
  {{- if not .Values.admin.existingKeys }}
    {{- fail "admin.enabled is true, and other pods could change the cluster without keys: set admin.existingKeys" }}
  {{- end }}
  {{- if hasKey (fromYaml (include "ttserve.args" .)) "admin" }}
    {{- fail "admin.enabled is true and the served file has args.admin: give one of them" }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "ttserve.checkApiKeys" -}}
{{- $given := dig "ingress" "api_keys" "" (fromYaml (include "ttserve.args" .)) }}
{{- $secret := .Values.secrets.existingApiKeys }}
{{- if and $given $secret }}
  {{- fail (printf "secrets.existingApiKeys is %s and the served file has args.ingress.api_keys %s: give one of them" $secret $given) }}
{{- end }}
{{- with .Values.monitoring.serviceMonitor }}
  {{- if and .enabled (include "ttserve.hasApiKeys" $) (not .apiKey.secretName) }}
    {{- fail "monitoring.serviceMonitor.enabled is true, and with API keys /metrics answers 401 to scrapes without one: set monitoring.serviceMonitor.apiKey.secretName" }}
  {{- end }}
{{- end }}
{{- $found := lookup "v1" "Secret" .Release.Namespace (default "-" $secret) }}
{{- if and $secret $found (not (hasKey (default (dict) $found.data) .Values.secrets.apiKeysName)) }}
  {{- fail (printf "Secret %s has no key %s (secrets.apiKeysName), it has %s" $secret .Values.secrets.apiKeysName (keys (default (dict) $found.data) | sortAlpha | join ", ")) }}
{{- end }}
{{- end }}
