#!/usr/bin/env bash
# Builds the programs of the chart's tests from the Go modules pinned in programs/*/go.mod, into BIN
# (.kit of the repository). Existing programs are not built again. Needs Go 1.26; 11 minutes on two cores without caches.
#
#   programs.sh chart    helm, helm-unittest, kubeconform, the definitions of custom resources
#   programs.sh node     the same, and those of a Kubernetes node
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
BIN=${BIN:-$(cd "$here/../.." && pwd)/.kit}
mkdir -p "$BIN/crds"

build() {  # build MODULE NAME PACKAGE [LDFLAGS]
    [ -x "$BIN/$2" ] && return 0
    echo "building $2" >&2
    (cd "$here/programs/$1" && go build -trimpath -ldflags "-s -w ${4:-}" -o "$BIN/$2.new" "$3")
    mv "$BIN/$2.new" "$BIN/$2"
}

folder() {  # folder MODULE PATH: where Go keeps a module's files
    (cd "$here/programs/$1" && go mod download "$2" && go list -m -f '{{.Dir}}' "$2")
}

build helm helm helm.sh/helm/v4/cmd/helm
build unittest helm-unittest github.com/helm-unittest/helm-unittest/cmd/helm-unittest
build kubeconform kubeconform github.com/yannh/kubeconform/cmd/kubeconform
install -m 644 "$(folder kuberay github.com/ray-project/kuberay/ray-operator)"/config/crd/bases/*.yaml "$BIN/crds/"
install -m 644 "$(folder crds github.com/prometheus-operator/prometheus-operator)"/example/prometheus-operator-crd/*_{pod,service}monitors.yaml \
    "$(folder crds github.com/prometheus-operator/prometheus-operator)"/example/prometheus-operator-crd/*_prometheusrules.yaml "$BIN/crds/"
install -m 644 "$(folder crds sigs.k8s.io/gateway-api)"/config/crd/standard/gateway.networking.k8s.io_{gateways,httproutes}.yaml "$BIN/crds/"
install -m 644 "$(folder crds sigs.k8s.io/gateway-api-inference-extension)"/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml "$BIN/crds/"
[ "${1:-}" = chart ] && exit 0

# A Kubernetes built without these calls itself v0.0.0, which clients refuse.
version=$(cd "$here/programs/kubernetes" && go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${version#v1.}; minor=${minor%%.*}
at=k8s.io/component-base/version
for name in kube-apiserver kube-controller-manager kube-scheduler kubectl kube-proxy kubelet; do
    build kubernetes $name k8s.io/kubernetes/cmd/$name \
        "-X $at.gitVersion=$version -X $at.gitMajor=1 -X $at.gitMinor=$minor"
done
build etcd etcd go.etcd.io/etcd/server/v3
build coredns coredns github.com/coredns/coredns
build kwok kwok sigs.k8s.io/kwok/cmd/kwok
build kuberay ray-operator github.com/ray-project/kuberay/ray-operator

# Stages of KWOK's nodes and pods: heartbeats, and pods that are ready at once.
stages=$(folder kwok sigs.k8s.io/kwok)/kustomize/stage
for file in node/fast/node-initialize node/heartbeat/node-heartbeat pod/fast/pod-ready pod/fast/pod-complete pod/fast/pod-delete; do
    cat "$stages/$file.yaml"
    echo ---
done > "$BIN/kwok.yaml"
