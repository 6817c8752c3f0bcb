#!/usr/bin/env bash
# Build every file of a release twice from the last commit, compare and check them, and list them in dist/SHA256SUMS:
# `make release`. BASE=debian builds the image on a bootstrapped Debian, to try a release without access to the base images
# of the Dockerfile. Such an image has `trial` in its name and is not for users.
# Needs root or user namespaces for buildah, and the programs of the dependency group `release` on the PATH.
set -euo pipefail
shopt -s inherit_errexit

base=${1:-}
out=dist
STEPS=(python_packages node_packages chart monitoring sbom image) # each is a function

say() { printf 'rankscope: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# ---- build: each function runs in a clean checkout of the commit and gets the folder for its files -------------------
python_packages() {
    # Build the wheel from the tree, not from the source archive: `check_sdist` compares the two.
    python3 -m build --no-isolation --outdir "$1" --sdist . >"$log" 2>&1
    python3 -m build --no-isolation --outdir "$1" --wheel . >"$log" 2>&1
}

node_packages() { # deb and rpm
    "$root/.venv/bin/python" -m deploy.packages.build --output "$1" >"$log" 2>&1 || { tail "$log" >&2; fail "no packages"; }
}

chart() {
    PATH=$root/.venv/bin:$PATH helm package deploy/helm/rankscope --destination "$1" >"$log" 2>&1
}

monitoring() { # files for Prometheus, Alertmanager and Grafana
    local name=rankscope-monitoring-$version
    mkdir -p "$name" && cp -r grafana/dashboards grafana/provisioning deploy/alertmanager "$name"
    cp -r deploy/prometheus/rules "$name/rules"
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w \
        --create "$name" | gzip --no-name >"$1/$name.tar.gz"
    rm -r "$name"
}

sbom() {
    python3 -W ignore -m cyclonedx_py requirements exporter/requirements.txt --pyproject pyproject.toml \
        --output-reproducible --of JSON --output-file "$1/rankscope-exporter.cdx.json"
}

image() {
    local from=() file=$1/rankscope-exporter-$version-image.tar
    if [ "$base" ]; then
        from=(--pull-never) file=${file/-image/-trial-image}
        for name in $(sed -n 's/^FROM \([^ ]*\).*/\1/p' exporter/Dockerfile | sort -u); do images tag trial-base "$name"; done
    fi
    images build "${from[@]}" "${mirrors[@]}" --isolation chroot --network host --no-cache --format docker \
        --timestamp "$SOURCE_DATE_EPOCH" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" \
        --tag "rankscope-exporter:$version" --file exporter/Dockerfile . >"$log" 2>&1 || { tail "$log" >&2; fail "no image"; }
    images push --quiet "rankscope-exporter:$version" "docker-archive:$file"
    rewrite "$file" && gzip --no-name "$file"
}

# Make an image archive reproducible. Docker's format contains the build container's name, and the image's name is a digest
# of that. The OCI format does not, but has no health check.
rewrite() {
    local parts=$1.parts
    mkdir "$parts" && tar --extract --directory "$parts" --file "$1" && rm "$1"
    python3 - "$parts" "rankscope-exporter:$version" <<'END'
import json, pathlib, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(image,) = json.loads((folder / "manifest.json").read_text())
config = json.loads((folder / image["Config"]).read_text())
config.pop("container", None)
for part in ("config", "container_config"):
    config.get(part, {}).pop("Hostname", None)
(folder / "config.json").write_text(json.dumps(config))
manifest = {"Config": "config.json", "RepoTags": [name], "Layers": image["Layers"]}
(folder / "manifest.json").write_text(json.dumps([manifest]))
END
    (cd "$parts" && tar --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=0644 --create \
        --file "$1" manifest.json config.json $(python3 -c 'import json; print(*json.load(open("manifest.json"))[0]["Layers"])'))
    rm -rf "$parts"
}

# A separate store, in which a substitute base has the names of the real base images.
images() { buildah --root "$store/root" --runroot "$store/run" --registries-conf "$store/registries.conf" "$@"; }

open_store() {
    command -v buildah >/dev/null || fail "buildah is missing; as root: apt-get install buildah"
    mkdir -p "$store" && echo 'unqualified-search-registries = ["docker.io"]' >"$store/registries.conf"
    # If pip has a mirror, build the image from it. The image then has an empty /etc/pip.conf.
    mirrors=() && [ ! -e /etc/pip.conf ] || mirrors=(-v /etc/pip.conf:/etc/pip.conf:ro -v /etc/ssl/certs:/etc/ssl/certs:ro)
    [ "$base" ] || return 0
    say "using a bootstrapped Debian instead of the Dockerfile's base image: only for a trial"
    [ -e "$store/debian.tar" ] || { debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python-is-python3 \
        bookworm "$store/debian" >"$log" && tar --directory "$store/debian" --create --file "$store/debian.tar" .; }
    local container && container=$(images from scratch)
    images add --quiet "$container" "$store/debian.tar" / >/dev/null
    images config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    images commit --quiet --rm "$container" trial-base >/dev/null
}

build() { # FOLDER
    local tree=$work/tree step
    rm -rf "$tree" "$1" && mkdir -p "$tree" "$1" && git archive "$commit" | tar --extract --directory "$tree"
    for step in "${STEPS[@]}"; do
        say "building: $step"
        (cd "$tree" && "$step" "$1")
    done
    rm -r "$tree"
}

# ---- check -----------------------------------------------------------------------------------------------------------
check_sdist() {
    tar --extract --gzip --directory "$work" --file "$out/rankscope-$version.tar.gz"
    python3 -m build --no-isolation --wheel --outdir "$work/from-sdist" "$work/rankscope-$version" >"$log" 2>&1
    cmp "$wheel" "$work"/from-sdist/*.whl
}

# `serves COMMAND…`: start a simulated exporter with this command, and return whether it serves its metrics.
serves() {
    local port pid page
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    set -m # start in a new process group, to end the children of buildah with it
    "$@" --simulate 2 --web.listen-address "127.0.0.1:$port" >"$log" 2>&1 &
    pid=$!
    set +m
    for _ in {1..120}; do
        page=$(python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())' \
            "http://127.0.0.1:$port/metrics" 2>/dev/null) && break
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    { kill -- "-$pid" && wait "$pid"; } 2>/dev/null || true
    grep -q '^rankscope_gpu_info' <<<"$page" || { tail "$log" >&2; return 1; }
}

check_extras() {
    local extra venv
    for extra in '' $(unzip -p "$wheel" '*/METADATA' | sed -n 's/^Provides-Extra: //p'); do
        say "checking: pip install 'rankscope${extra:+[$extra]}'"
        venv=$work/venv-${extra:-none}
        python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check "$wheel${extra:+[$extra]}" 2>"$log"
        case $extra in
            '') "$venv/bin/python" -c 'import rankscope; rankscope.step()' && "$venv/bin/rankscope" --version >/dev/null ;;
            top) "$venv/bin/rankscope" top --once --run-dir "$venv" >/dev/null ;;
            *) serves "$venv/bin/rankscope-exporter" ;;
        esac || fail "rankscope[$extra] does not work from the wheel"
    done
}

check_image() {
    local archive=$work/image.tar container user
    gunzip --stdout "$work"/first/*image.tar.gz >"$archive"
    container=$(images from --quiet "docker-archive:$archive")
    # Run the entry point with the image's user and file system.
    serves images run --isolation chroot "$container" -- rankscope-exporter --state-dir=/var/lib/rankscope ||
        fail "the image does not serve"
    user=$(images run --isolation chroot "$container" -- python -c 'import os; print(os.getuid())')
    [ "$user" = 65534 ] || fail "the image runs as user $user, not 65534"
    images rm "$container" >/dev/null
}

root=$PWD version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' trainer_hooks/rankscope/_version.py)
work=$(mktemp -d -t rankscope-release.XXXX) && trap 'rm -rf "$work"' EXIT
store=$root/.release/store log=$root/.release/log
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$commit") && export SOURCE_DATE_EPOCH
git diff --quiet HEAD || fail "uncommitted changes: a release is built from the last commit"
[ "$base" = '' ] || [ "$base" = debian ] || fail "BASE is '$base'; use debian, or leave it empty for the real images"
open_store
build "$work/first"
build "$work/second"
diff --recursive "$work/first" "$work/second" || fail "two builds of the same commit differ"
mkdir -p "$out" && cp "$work"/first/* "$out"
wheel=$PWD/$out/rankscope-$version-py3-none-any.whl
say "checking: twine, hadolint, the source archive"
twine check --strict "$wheel" "$out/rankscope-$version.tar.gz" >"$log" || { cat "$log" >&2; fail "twine"; }
hadolint exporter/Dockerfile
check_sdist
check_extras
say "checking: the image" && check_image
(cd "$work/first" && sha256sum -- *) | tee "$out/SHA256SUMS"
[ "$base" = '' ] || say "built with a substitute base: do not publish the image"
