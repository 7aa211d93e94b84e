{{/* Pods of the head and of the worker groups. */}}

{{/* Requirements of Pod Security `restricted`, and a read-only image. */}}
{{- define "ttserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Environment of every pod of Ray. */}}
{{- define "ttserve.env" -}}
- name: HOME
  value: /tmp/home
- name: HF_HUB_OFFLINE
  value: "1"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Without them the output of a process grows without bound, and other logs of Ray to 3 GiB each.
- name: RAY_ROTATION_MAX_BYTES
  value: "67108864"
- name: RAY_ROTATION_BACKUP_COUNT
  value: "2"
# Where Prometheus can reach it; the network policies say from where.
- name: TTSERVE_OPERATIONS_BIND
  value: 0.0.0.0:8001
{{- with .Values.trustedProxies }}
- name: TTSERVE_TRUSTED_PROXIES
  value: {{ join "," . | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A container's resources with bounds of its ephemeral storage: the size limits of its pod's folders, and
   1 GiB for its output. It requests 1 GiB of the node's storage. `resources` overrides both.
   (dict "resources" (dict …) "sizes" (list "8Gi" …)) */}}
{{- define "ttserve.bounded" -}}
{{- $bytes := int64 1073741824 }}
{{- range .sizes }}
  {{- $bytes = add $bytes (include "ttserve.bytes" .) }}
{{- end }}
{{- /* Canonical, because KubeRay rewrites any other form. It then owns the field, and upgrades conflict. */}}
{{- $size := div $bytes 1048576 }}
{{- $unit := "Mi" }}
{{- range list "Gi" "Ti" }}
{{- if eq (mod $size 1024) 0 }}
{{- $size = div $size 1024 }}
{{- $unit = . }}
{{- end }}
{{- end }}
{{- $own := dict "requests" (dict "ephemeral-storage" "1Gi") "limits" (dict "ephemeral-storage" (printf "%d%s" $size $unit)) }}
{{- toYaml (mergeOverwrite $own (deepCopy (default (dict) .resources))) }}
{{- end }}

{{/* Volumes of a pod of Ray: (dict "root" $ "sizes" (dict "shmSize" … "tmpSize" … "homeSize" …) "isIngress" true "isHead" false).
   /run/ttserve is a volume of the image: HAProxy's folder must belong to user 1000 alone, and an emptyDir belongs to
   root. */}}
{{- define "ttserve.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .sizes.tmpSize }}}
- name: home
  emptyDir: {sizeLimit: {{ .sizes.homeSize }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .sizes.shmSize }}}
- name: keys
  secret:
    secretName: {{ include "ttserve.keysSecret" .root }}
    defaultMode: 0440
{{- if and .isIngress .root.Values.secrets.existingApiKeys }}
- name: api-keys
  secret:
    secretName: {{ .root.Values.secrets.existingApiKeys }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.secrets.apiKeysName | quote }}, path: {{ .root.Values.secrets.apiKeysName | quote }}}]
{{- end }}
{{- if and .isHead .root.Values.admin.enabled }}
- name: admin-keys
  secret:
    secretName: {{ .root.Values.admin.existingKeys }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.admin.keysName | quote }}, path: {{ .root.Values.admin.keysName | quote }}}]
{{- end }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Mounts of a pod of Ray: (dict "root" $ "isIngress" true). API keys are a folder, because a file that is mounted by
   `subPath` does not follow its Secret. */}}
{{- define "ttserve.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /tmp/home}
- {name: shm, mountPath: /dev/shm}
- {name: keys, mountPath: /run/secrets/ttserve, readOnly: true}
{{- if and .isIngress .root.Values.secrets.existingApiKeys }}
- {name: api-keys, mountPath: {{ include "ttserve.apiKeysFolder" . }}, readOnly: true}
{{- end }}
{{- if and .isHead .root.Values.admin.enabled }}
- {name: admin-keys, mountPath: {{ include "ttserve.adminKeysFolder" . }}, readOnly: true}
{{- end }}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Placement of pods, from the head's or a group's values; `spread`: a group whose pods go to
   different hosts if possible, unless its values set topologySpreadConstraints. */}}
{{- define "ttserve.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .topologySpreadConstraints | nindent 2 }}
{{- else if .spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "ttserve.selector" .spread.root | nindent 8 }}
        ttserve.io/group: {{ .spread.name }}
{{- end }}
{{- end }}

{{/* Ray's custom resources of a group, as `ray start` wants them: JSON in quotes of its own. */}}
{{- define "ttserve.rayResources" -}}
{{- $resources := dict }}
{{- range .roles }}
  {{- $_ := set $resources (include "ttserve.roleResource" .) 1 }}
{{- end }}
{{- if gt (int .boards.count) 0 }}
  {{- $_ := set $resources "TTNPU" (int .boards.count) }}
{{- end }}
{{- printf "%s" (toJson $resources | quote) }}
{{- end }}

{{- define "ttserve.apiKeysFolder" -}}
/run/secrets/ttserve-api-keys
{{- end }}

{{- define "ttserve.adminKeysFolder" -}}
/run/secrets/ttserve-admin-keys
{{- end }}

{{/* Folder of compiled kernels and converted weights in pods with boards. */}}
{{- define "ttserve.cacheFolder" -}}
/var/cache/ttserve
{{- end }}

{{- define "ttserve.headPod" -}}
metadata:
  labels:
    {{- include "ttserve.podLabels" . | nindent 4 }}
    app.kubernetes.io/component: head
  {{- with merge (dict) .Values.head.annotations .Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "ttserve.serviceAccount" . }}
  # For Ray's autoscaler alone.
  automountServiceAccountToken: {{ .Values.autoscaling.enabled }}
  enableServiceLinks: false
  securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: 30
  containers:
    - name: ray-head
      image: {{ include "ttserve.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        # KubeRay makes the Service for Serve from it, though the head is none of its pods.
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        {{- if .Values.admin.enabled }}
        - {name: admin, containerPort: 8002}
        {{- end }}
      env:
        {{- include "ttserve.env" . | nindent 8 }}
      resources:
        {{- include "ttserve.bounded" (dict "resources" .Values.head.resources "sizes" (list .Values.head.tmpSize .Values.head.homeSize)) | nindent 8 }}
      securityContext:
        {{- include "ttserve.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "ttserve.volumeMounts" (dict "root" . "isIngress" false "isHead" true) | nindent 8 }}
  volumes:
    {{- include "ttserve.volumes" (dict "root" . "sizes" .Values.head "isIngress" false "isHead" true) | nindent 4 }}
  {{- include "ttserve.scheduling" .Values.head | nindent 2 }}
{{- end }}

{{/* (dict "root" $ "name" "prefill" "group" (dict …)) */}}
{{- define "ttserve.workerPod" -}}
{{- $mode := .root.Values.device.mode }}
{{- $count := int .group.boards.count }}
{{- $hasBoards := gt $count 0 }}
{{- /* A minute for successors to start in, the drain, and twice the time in which an engine ends. */}}
{{- $leave := add 60 (include "ttserve.drainSeconds" .root) (ternary 120 10 $hasBoards) }}
{{- $cache := .root.Values.device.cache }}
{{- $sizes := list .group.tmpSize .group.homeSize }}
{{- $isIngress := has "ingress" .group.roles }}
{{- if and $hasBoards (not (or $cache.hostPath $cache.claim)) }}
  {{- $sizes = append $sizes $cache.sizeLimit }}
{{- end }}
metadata:
  labels:
    {{- include "ttserve.podLabels" .root | nindent 4 }}
    app.kubernetes.io/component: worker
    ttserve.io/group: {{ .name }}
    {{- if $isIngress }}
    ttserve.io/ingress: "true"
    {{- end }}
  {{- with merge (dict) .group.annotations .root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "ttserve.serviceAccount" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if $hasBoards }}
  hostIPC: {{ eq $mode "hostPath" }}
  {{- end }}
  securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $leave 30 }}
  {{- if and $hasBoards (eq $mode "dra") }}
  resourceClaims:
    - name: boards
      resourceClaimTemplateName: {{ include "ttserve.claimTemplate" . }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "ttserve.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- if $hasBoards }}
      # KubeRay runs it before `ray start`. A pod may see no device node but number 3: Ray counts and
      # numbers its boards by this variable alone.
      args: ['export TT_VISIBLE_DEVICES=$(ls /dev/tenstorrent | grep -E "^[0-9]+$" | sort -n | paste -sd,)']
      {{- end }}
      ports:
        - {name: serve, containerPort: 8000}
        - {name: operations, containerPort: 8001}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "ttserve.env" .root | nindent 8 }}
        {{- if $hasBoards }}
        # ttnn makes a folder tt-metal-cache in it.
        - name: TT_METAL_CACHE
          value: {{ include "ttserve.cacheFolder" . }}
        {{- end }}
        {{- with .group.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $resources := deepCopy .group.resources }}
      {{- if and $hasBoards (eq $mode "plugin") }}
        {{- $board := dict (printf "%s/%s" .root.Values.device.plugin.prefix .group.boards.type) $count }}
        {{- $_ := set $resources "limits" (merge (dict) (default (dict) $resources.limits) $board) }}
      {{- end }}
      {{- if and $hasBoards .root.Values.device.hugepages.enabled }}
        {{- $pages := dict "hugepages-1Gi" (printf "%dGi" (int (mul $count .root.Values.device.hugepages.perBoard))) }}
        {{- $_ := set $resources "limits" (merge (dict) (default (dict) $resources.limits) $pages) }}
        {{- $_ := set $resources "requests" (merge (dict) (default (dict) $resources.requests) $pages) }}
      {{- end }}
      {{- if and $hasBoards (eq $mode "dra") }}
        {{- $_ := set $resources "claims" (list (dict "name" "boards")) }}
      {{- end }}
      resources:
        {{- include "ttserve.bounded" (dict "resources" $resources "sizes" $sizes) | nindent 8 }}
      # A pod is ready if the pools answer through it; KubeRay's own probe would ask the proxy alone. The
      # probe fails while weights load, which may take long. Liveness is a separate probe of Ray's.
      readinessProbe:
        exec:
          command: [wget, -q, -T, "4", -O, /dev/null, "http://127.0.0.1:8000/health"]
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop:
          exec:
            command: [ttserve, leave, --seconds, {{ $leave | quote }}]
      securityContext:
        {{- if and $hasBoards (eq $mode "hostPath") }}
        privileged: true
        {{- else }}
        {{- include "ttserve.containerSecurity" .root | nindent 8 }}
        {{- end }}
      volumeMounts:
        {{- include "ttserve.volumeMounts" (dict "root" .root "isIngress" $isIngress "isHead" false) | nindent 8 }}
        {{- if and $hasBoards (eq $mode "hostPath") }}
        - {name: boards, mountPath: /dev/tenstorrent}
        {{- end }}
        {{- if and $hasBoards .root.Values.device.hugepages.enabled }}
        - {name: hugepages, mountPath: /dev/hugepages-1G}
        {{- end }}
        {{- if $hasBoards }}
        # Not the home's .cache, where other packages may keep files that they execute.
        - {name: cache, mountPath: {{ include "ttserve.cacheFolder" . }}}
        {{- end }}
  volumes:
    {{- include "ttserve.volumes" (dict "root" .root "sizes" .group "isIngress" $isIngress "isHead" false) | nindent 4 }}
    {{- if and $hasBoards (eq $mode "hostPath") }}
    - name: boards
      hostPath: {path: /dev/tenstorrent, type: Directory}
    {{- end }}
    {{- if and $hasBoards .root.Values.device.hugepages.enabled }}
    - name: hugepages
      emptyDir: {medium: HugePages-1Gi}
    {{- end }}
    {{- if $hasBoards }}
    - name: cache
      {{- if $cache.claim }}
      persistentVolumeClaim: {claimName: {{ $cache.claim }}}
      {{- else if $cache.hostPath }}
      hostPath: {path: {{ $cache.hostPath }}, type: Directory}
      {{- else }}
      emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
      {{- end }}
    {{- end }}
  {{- include "ttserve.scheduling" (merge (dict "spread" (dict "root" .root "name" .name)) .group) | nindent 2 }}
{{- end }}
