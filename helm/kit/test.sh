#!/usr/bin/env bash
# Everything that the chart must pass, for `make test-helm`: lint, helm-unittest, tests/helm (every file
# of helm/ttserve/ci against the schemas of Kubernetes and of the custom resources, alert rules), and
# tests/kubernetes on a real cluster: the one that KUBECONFIG names, else a node of its own.
# Tests that this machine cannot run are skipped with a message. With TTSERVE_REQUIRE_NODE only Go and
# the kernel's rights may be absent, and Debian's packages are installed.
#
#   test.sh                all of the above
#   test.sh chart          without the cluster
#   test.sh build          make what the tests need, and run none
#   test.sh build-chart    the same without the cluster
#
#   PYTHON: an interpreter with the tests' packages. BIN: output folder of builds. TESTS: part of them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
chart=$root/helm/ttserve
export BIN=${BIN:-$root/.kit} PYTHON=${PYTHON:-python3}
cd "$root"

skip() { echo "test-helm: skipped $1" >&2; exit 0; }

# COMMAND:PACKAGE of everything that the node, its images and the rules need.
needs="containerd:containerd runc:runc ip:iproute2 nft:nftables openssl:openssl sysctl:procps buildah:buildah
    debootstrap:debootstrap gcc:gcc promtool:prometheus"

absent_packages() {
    for need in $needs; do
        command -v "${need%:*}" > /dev/null || echo "${need#*:}"
    done
    [ -x /usr/lib/cni/bridge ] || echo containernetworking-plugins
}

has_go() {
    local version
    version=$(go env GOVERSION 2> /dev/null) || return 1
    [ "$(printf 'go1.26\n%s\n' "$version" | sort -V | head -1)" = go1.26 ]
}

# Prints what the kernel refuses here, or nothing.
refused() {
    unshare --net true 2> /dev/null || echo "a network namespace"
    unshare --mount sh -c 'mount -t tmpfs none /mnt' 2> /dev/null || echo "a mount"
    local group
    group=$(find /sys/fs/cgroup -maxdepth 1 -mindepth 1 -type d ! -name unified | head -1)
    [ ! -f /sys/fs/cgroup/cgroup.controllers ] || group=/sys/fs/cgroup
    mkdir "$group/ttserve-probe" 2> /dev/null && rmdir "$group/ttserve-probe" || echo "a control group"
}

check_chart() {
    "$BIN/helm" lint --quiet "$chart"
    "$BIN/helm-unittest" "$chart"
    if [ ! -d "$BIN/schemas" ]; then
        # Nothing has needed the module's sources so far, where only the chart's programs were built.
        specification=$(cd "$here/programs/kubernetes" && go mod download k8s.io/kubernetes \
            && go list -m -f '{{.Dir}}' k8s.io/kubernetes)/api/openapi-spec
        "$PYTHON" "$here/schemas.py" "$specification" "$BIN/crds" "$BIN/schemas.new"
        mv "$BIN/schemas.new" "$BIN/schemas"
    fi
    "$PYTHON" -m pytest -q tests/helm
}

has_go || skip "everything: Go 1.26 is not here (go.dev/dl), and the chart's programs are built with it"
absent=$(absent_packages)
if [ -n "$absent" ] && [ -n "${TTSERVE_REQUIRE_NODE:-}" ] && [ "$(id -u)" = 0 ]; then
    apt-get update -q && apt-get install -q -y -o DPkg::Lock::Timeout=600 --no-install-recommends $absent
    absent=$(absent_packages)
fi
[ -z "$absent" ] || [ -z "${TTSERVE_REQUIRE_NODE:-}" ] || { echo "test-helm: absent: $absent" >&2; exit 1; }
command -v promtool > /dev/null || skip "everything: promtool is not here: apt install prometheus"

# The compiler computes while the images' packages are fetched and unpacked.
build_node() {
    local programs images=0
    "$here/programs.sh" node &
    programs=$!
    "$here/images.sh" || images=$?
    wait $programs  # also after a failure: a second build must not overlap this one
    return $images
}

only_builds="" without_cluster=""
case "${1:-}" in
    "") ;;
    chart) without_cluster=yes ;;
    build) only_builds=yes ;;
    build-chart) only_builds=yes without_cluster=yes ;;
    *) echo "test-helm: no such argument: $1" >&2; exit 2 ;;
esac
"$here/programs.sh" chart
[ -n "$only_builds" ] || check_chart
[ -z "$without_cluster" ] || exit 0
tests=${TESTS:-tests/kubernetes}
if [ -z "${KUBECONFIG:-}" ]; then
    [ "$(id -u)" = 0 ] || skip "$tests: a node needs root; KUBECONFIG names a cluster to use instead"
    [ -z "$absent" ] || skip "$tests: apt install" $absent
    refusals=$(refused)
    [ -z "$refusals" ] || skip "$tests: this machine's kernel does not let root make ${refusals//$'\n'/ or }"
    build_node
fi
[ -n "$only_builds" ] || exec "$PYTHON" -m pytest -q -x -s $tests
