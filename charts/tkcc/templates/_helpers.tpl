{{- define "tkcc.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name }}{{ end -}}
{{- end }}

{{- define "tkcc.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "tkcc.name" .) -}}
{{- end }}

{{- define "tkcc.selector" -}}
app.kubernetes.io/name: tkcc-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tkcc.labels" -}}
{{ include "tkcc.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tkcc.image" -}}
{{- $image := index .root.Values.image .part -}}
{{- $unset := printf "set image.%s.repository and .tag: no images are published; build images/%s.Dockerfile and push it" .part .part -}}
{{- printf "%s:%s" (required $unset $image.repository) ($image.tag | default .root.Chart.AppVersion) -}}
{{- end }}

{{/* The operator's settings file: values.settings, and what other values say. */}}
{{- define "tkcc.settings" -}}
{{- $images := dict
  "engine" (include "tkcc.image" (dict "root" . "part" "engine"))
  "worker" (include "tkcc.image" (dict "root" . "part" "worker"))
  "pullPolicy" .Values.image.pullPolicy
  "pullSecrets" .Values.image.pullSecrets -}}
{{- $own := dict
  "images" $images
  "operatorNamespace" .Release.Namespace
  "leaseName" (include "tkcc.name" .)
  "networkPolicies" .Values.networkPolicy.enabled -}}
{{- toYaml (merge $own .Values.settings) -}}
{{- end }}

{{/* All that the operator may do with the objects of one namespace. Every verb is used; tests compare them with the API
     server's audit log. What it grants to a recompile Job (patch of recompilationruns/status, get and patch of one
     ConfigMap) is among them, or the API server would refuse the grant. */}}
{{- define "tkcc.rules" -}}
- apiGroups: [tkcc.dev]
  resources: [inferencedeployments]
  verbs: [get, list, watch]
- apiGroups: [tkcc.dev]
  resources: [recompilationruns]
  verbs: [get, list, watch, create, delete]
- apiGroups: [tkcc.dev]
  resources: [inferencedeployments/status, recompilationruns/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [secrets, serviceaccounts]
  verbs: [get, create, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, create, delete]
{{- if .Values.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
{{- end }}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- end }}
