{{/* Names and labels. */}}

{{- define "ttserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters at most: KubeRay adds to it, and a Service's name has 63. */}}
{{- define "ttserve.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "ttserve.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ttserve.selector" -}}
app.kubernetes.io/name: {{ include "ttserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Pods of Ray, head and workers. */}}
{{- define "ttserve.raySelector" -}}
matchLabels:
  {{- include "ttserve.selector" . | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [head, worker]}
{{- end }}

{{/* Pods of one component: (dict "root" $ "component" "head") */}}
{{- define "ttserve.componentSelector" -}}
matchLabels:
  {{- include "ttserve.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of pods, without the chart's version, which would replace all pods at each new version. */}}
{{- define "ttserve.podLabels" -}}
{{ include "ttserve.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ttserve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "ttserve.podLabels" . }}
{{- end }}

{{/* metadata of an object: (dict "root" $ "name" "…" "annotations" (dict …) "labels" (dict …)) */}}
{{- define "ttserve.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "ttserve.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "ttserve.image" -}}
{{- include "ttserve.imageName" (dict "root" . "key" "image" "image" .Values.image "tag" (default .Chart.AppVersion .Values.image.tag)) }}
{{- end }}

{{- define "ttserve.redisImage" -}}
{{- with .Values.gcsFaultTolerance.image }}
{{- include "ttserve.imageName" (dict "root" $ "key" "gcsFaultTolerance.image" "image" . "tag" .tag) }}
{{- end }}
{{- end }}

{{/* With a digest the tag is for readers alone: (dict "root" $ "key" "image" "image" (dict …) "tag" …) */}}
{{- define "ttserve.imageName" -}}
{{- if .image.digest }}
{{- printf "%s:%s@%s" .image.repository .tag .image.digest }}
{{- else if .root.Values.image.requireDigests }}
{{- fail (printf "%s.digest is empty and image.requireDigests is true: give the sha256:… that the registry shows for %s:%s" .key .image.repository .tag) }}
{{- else }}
{{- printf "%s:%s" .image.repository .tag }}
{{- end }}
{{- end }}

{{- define "ttserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "ttserve.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The Secret with Redis's password; empty for an existing Redis without a password. */}}
{{- define "ttserve.redisSecret" -}}
{{- with .Values.gcsFaultTolerance }}
{{- if .existingRedisSecret }}
{{- .existingRedisSecret }}
{{- else if not .existingRedis }}
{{- include "ttserve.fullname" $ }}-redis
{{- end }}
{{- end }}
{{- end }}

{{/* Name of a group's claim template. A template is immutable: other boards need another name.
   (dict "root" $ "name" "prefill" "group" (dict …)) */}}
{{- define "ttserve.claimTemplate" -}}
{{- $what := list .group.boards.type (int .group.boards.count) .root.Values.device.dra | toJson | sha256sum | trunc 8 }}
{{- printf "%s-%s-%s" (include "ttserve.fullname" .root) .name $what }}
{{- end }}

{{- define "ttserve.keysSecret" -}}
{{- default (printf "%s-keys" (include "ttserve.fullname" .)) .Values.secrets.existingKeys }}
{{- end }}
