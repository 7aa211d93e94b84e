#!/usr/bin/env bash
# One real Kubernetes node on this machine, in a network namespace of its own: etcd, API server,
# controller manager, scheduler, kubelet on containerd and runc, kube-proxy, CoreDNS, KubeRay's
# operator, and KWOK for simulated nodes. No image registry, no route outside.
#
#   node.sh up            start it; prints the kubeconfig's path
#   node.sh exec CMD...   run a command where the cluster is: kubectl, helm, curl, python
#   node.sh load [TAR]    import a docker archive, or standard input, into the node
#   node.sh down          end it, also one that was killed half-way, and remove everything
#   node.sh guard PID     end it when a process has ended, for any reason
#
# BIN: the output folder of programs.sh and images.sh. STATE: the folder of all files that the node
# writes. NAME: of the network namespace and of the pods' control group. Needs root, and Debian's
# containerd, runc, containernetworking-plugins, iproute2, nftables, openssl, procps.
set -euo pipefail
BIN=${BIN:-$(cd "$(dirname "$0")/../.." && pwd)/.kit}
NAME=${NAME:-ttserve-node}
STATE=${STATE:-/tmp/$NAME}
IP=10.210.0.1
SERVICES=10.211.0.0/16
PODS=10.212.0.0/16
API=https://$IP:6443
ROLES="admin controllers scheduler kubelet proxy dns operator"

inside() { ip netns exec "$NAME" "$@"; }

# `ip netns exec` mounts a /sys of its own, without control groups: nsenter does not.
start() {  # start PROGRAM CMD...
    local program=$1; shift
    setsid nsenter --net=/run/netns/"$NAME" "$@" > "$STATE/log/$program.log" 2>&1 < /dev/null &
}

wait_for() {  # wait_for SECONDS WHAT CMD...
    local seconds=$1 what=$2; shift 2
    for ((i = 0; i < seconds * 2; i++)); do
        "$@" > /dev/null 2>&1 && return 0
        sleep 0.5
    done
    echo "node.sh: $what is not there after $seconds s; $STATE/log says why" >&2
    return 1
}

token() { cat "$STATE/pki/$1.token"; }

kubeconfig() {  # kubeconfig ROLE
    cat > "$STATE/$1.conf" <<EOF
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "$API", certificate-authority: "$STATE/pki/apiserver.crt"}}]
users: [{name: u, user: {token: "$(token "$1")"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
EOF
    chmod 600 "$STATE/$1.conf"
}

network() {
    ip netns add "$NAME"
    inside ip link set lo up
    inside ip link add node0 type bridge
    inside ip addr add $IP/24 dev node0
    inside ip link set node0 up
    inside ip route add default dev node0
    inside sysctl -qw net.ipv4.ip_forward=1
    inside sysctl -qw net.bridge.bridge-nf-call-iptables=1 2> /dev/null || true
    mkdir -p /etc/netns/"$NAME"
    printf 'nameserver %s\nsearch svc.cluster.local cluster.local\noptions ndots:5\n' $IP > /etc/netns/"$NAME"/resolv.conf
}

identities() {
    openssl genrsa -out "$STATE/pki/sa.key" 2048 2> /dev/null
    openssl rsa -in "$STATE/pki/sa.key" -pubout -out "$STATE/pki/sa.pub" 2> /dev/null
    for role in $ROLES; do
        openssl rand -hex 16 > "$STATE/pki/$role.token"
    done
    cat > "$STATE/pki/tokens.csv" <<EOF
$(token admin),admin,1,"system:masters"
$(token controllers),system:kube-controller-manager,2,"system:masters"
$(token scheduler),system:kube-scheduler,3
$(token kubelet),system:node:node0,4,"system:nodes"
$(token proxy),system:kube-proxy,5
$(token dns),node:dns,6,"system:masters"
$(token operator),node:kuberay,7,"system:masters"
EOF
    chmod 600 "$STATE"/pki/*
    for role in $ROLES; do kubeconfig "$role"; done
}

control_plane() {
    start etcd "$BIN/etcd" --data-dir "$STATE/etcd" --unsafe-no-fsync --log-level warn \
        --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
        --listen-peer-urls http://127.0.0.1:2380
    start kube-apiserver "$BIN/kube-apiserver" --etcd-servers http://127.0.0.1:2379 \
        --advertise-address $IP --bind-address $IP --secure-port 6443 \
        --cert-dir "$STATE/pki" --token-auth-file "$STATE/pki/tokens.csv" \
        --authorization-mode Node,RBAC --service-cluster-ip-range $SERVICES \
        --service-account-issuer https://kubernetes.default.svc \
        --service-account-key-file "$STATE/pki/sa.pub" --service-account-signing-key-file "$STATE/pki/sa.key" \
        --enable-admission-plugins NodeRestriction --allow-privileged=true \
        --kubelet-preferred-address-types InternalIP
    wait_for 60 "the API server" inside "$BIN/kubectl" --kubeconfig "$STATE/admin.conf" get --raw /readyz
    start kube-controller-manager "$BIN/kube-controller-manager" --kubeconfig "$STATE/controllers.conf" \
        --service-account-private-key-file "$STATE/pki/sa.key" --root-ca-file "$STATE/pki/apiserver.crt" \
        --use-service-account-credentials --bind-address 127.0.0.1 --leader-elect=false
    start kube-scheduler "$BIN/kube-scheduler" --kubeconfig "$STATE/scheduler.conf" \
        --bind-address 127.0.0.1 --leader-elect=false
}

containers() {
    cat > "$STATE/cni/10-pods.conflist" <<EOF
{"cniVersion": "1.0.0", "name": "$NAME", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$PODS"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "$STATE/ipam"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
EOF
    # Root may lack CAP_SYS_RESOURCE, and then cannot set a negative score of its own.
    cat > "$STATE/containerd.toml" <<EOF
version = 2
root = "$STATE/containerd/root"
state = "$STATE/containerd/state"
[grpc]
  address = "$STATE/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$STATE/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
EOF
    start containerd containerd -c "$STATE/containerd.toml"
    wait_for 30 containerd test -S "$STATE/containerd.sock"
    load "$BIN/pause.tar" > /dev/null
}

node() {
    for controller in $(control_groups); do mkdir -p "$controller/$NAME"; done
    cat > "$STATE/kubelet.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $IP
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /$NAME
failSwapOn: false
clusterDNS: [$IP]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix://$STATE/containerd.sock
imageServiceEndpoint: unix://$STATE/containerd.sock
resolvConf: /etc/netns/$NAME/resolv.conf
staticPodPath: ""
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
enforceNodeAllocatable: []
EOF
    start kubelet "$BIN/kubelet" --config "$STATE/kubelet.yaml" --kubeconfig "$STATE/kubelet.conf" \
        --root-dir "$STATE/kubelet" --hostname-override node0 --node-ip $IP
    cat > "$STATE/proxy.yaml" <<EOF
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddress: $IP
clusterCIDR: $PODS
clientConnection: {kubeconfig: $STATE/proxy.conf}
hostnameOverride: node0
conntrack: {maxPerCore: 0}
EOF
    start kube-proxy "$BIN/kube-proxy" --config "$STATE/proxy.yaml"
    cat > "$STATE/Corefile" <<EOF
.:53 {
    bind $IP
    kubernetes cluster.local in-addr.arpa {
        kubeconfig $STATE/dns.conf x
        pods insecure
    }
    cache 2
    errors
}
EOF
    start coredns "$BIN/coredns" -conf "$STATE/Corefile"
    wait_for 60 "the node" is_node_ready
    inside "$BIN/kubectl" --kubeconfig "$STATE/admin.conf" create clusterrolebinding "$NAME-proxy" \
        --clusterrole system:node-proxier --user system:kube-proxy > /dev/null
}

is_node_ready() {
    inside "$BIN/kubectl" --kubeconfig "$STATE/admin.conf" get node node0 \
        -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' | grep -q True
}

operators() {
    inside "$BIN/kubectl" --kubeconfig "$STATE/admin.conf" apply --server-side -f "$BIN/crds" > /dev/null
    # This way it has the cluster's DNS, as its pod would have.
    setsid ip netns exec "$NAME" env KUBECONFIG="$STATE/operator.conf" "$BIN/ray-operator" \
        --enable-leader-election=false --metrics-addr 127.0.0.1:8081 --health-probe-bind-address 127.0.0.1:8082 \
        > "$STATE/log/operator.log" 2>&1 < /dev/null &
    start kwok "$BIN/kwok" --kubeconfig "$STATE/operator.conf" --manage-all-nodes=false \
        --manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake --server-address 127.0.0.1:10247 --config "$BIN/kwok.yaml"
}

up() {
    [ "$(id -u)" = 0 ] || { echo "node.sh: needs root, for network namespaces and containers" >&2; exit 1; }
    [ -e "$STATE" ] && { echo "node.sh: $STATE is there: a node runs, or was killed; node.sh down ends it" >&2; exit 1; }
    mkdir -p "$STATE"/{log,pki,etcd,cni,manifests,kubelet}
    network
    identities
    control_plane
    containers
    node
    operators
    echo "$STATE/admin.conf"
}

load() { ctr -a "$STATE/containerd.sock" -n k8s.io images import "${1:--}"; }

control_groups() {  # every hierarchy of version 1, or the one of version 2
    if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
        echo /sys/fs/cgroup
    else
        find /sys/fs/cgroup -maxdepth 1 -mindepth 1 -type d
    fi
}

# A process of the node is in the network namespace, or has the folder in its command line, or is in
# the pods' control group.
processes() {
    ip netns pids "$NAME" 2> /dev/null || true
    # Listed before grep starts: its own command line has the folder too.
    local running=(/proc/[0-9]*/cmdline)
    grep -lsF "$STATE/" "${running[@]}" | cut -d/ -f3 | grep -vx $$ || true
    for controller in $(control_groups); do
        find "$controller/$NAME" -name cgroup.procs -exec cat {} + 2> /dev/null || true
    done
}

down() {
    set +e
    local pids
    for signal in TERM KILL KILL; do
        pids=$(processes | sort -u)
        [ -n "$pids" ] && kill -$signal $pids 2> /dev/null
        for ((i = 0; i < 10; i++)); do
            [ -z "$(processes)" ] && break
            sleep 0.2
        done
    done
    grep -o " $STATE/[^ ]*" /proc/mounts | sort -r | while read -r at; do umount -l "$at" 2> /dev/null; done
    rm -f /var/lib/cni/results/"$NAME"-*
    rmdir /var/lib/cni/results /var/lib/cni 2> /dev/null
    ip netns del "$NAME" 2> /dev/null
    for controller in $(control_groups); do
        find "$controller/$NAME" -depth -type d -exec rmdir {} + 2> /dev/null
    done
    rm -rf /etc/netns/"$NAME" "$STATE"
    [ -z "$(processes)" ] && [ ! -e "$STATE" ]
}

guard() {
    tail --pid="$1" -f /dev/null
    [ ! -e "$STATE" ] || down
}

case ${1:-} in
up) up ;;
down) down ;;
exec) shift; export KUBECONFIG=$STATE/admin.conf PATH=$BIN:$PATH; exec ip netns exec "$NAME" "$@" ;;
load) load "${2:-}" ;;
guard) guard "$2" ;;
*) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
