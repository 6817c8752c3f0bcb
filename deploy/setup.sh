#!/usr/bin/env bash
# What `make` installs before anything else runs: `setup.sh venv PYTHON` or `setup.sh servers`.
# Where something cannot be installed it says in one line what to install.
set -euo pipefail

say() { printf 'rankscope: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

may_install() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }

# Debian's packages by name. The lists of a fresh machine are empty, so they are fetched when the first try fails.
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

make_venv() {
    local python=$1
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "needs Python 3.10 or later as '$python'; name another with: make PYTHON=python3.11"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        may_install || fail "Python has no venv module here; as root: apt-get install python3-venv"
        say "installing python3-venv"
        apt_install python3-venv
    fi
    say "making .venv and installing the packages for development (torch is the large one: some minutes the first time)"
    "$python" -m venv .venv
    # Dependency groups need pip 25.1; Debian 12 brings 23.
    .venv/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
    .venv/bin/pip install --progress-bar on --disable-pip-version-check --editable '.[exporter]' --group dev |
        grep --line-buffered -E '^(Collecting|Downloading|Installing|Successfully)' >&2
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
    # Wanted are the programs. The services that Debian starts with them would only sit on ports 9090 and 9093.
    if [ -d /run/systemd/system ]; then
        systemctl disable --quiet --now prometheus prometheus-alertmanager || true
    fi
    have_servers || fail "installed prometheus and prometheus-alertmanager, yet they are not on the PATH"
}

case "${1:-}" in
    venv) make_venv "${2:-python3}" ;;
    servers) install_servers ;;
    *) fail "usage: setup.sh venv PYTHON | servers" ;;
esac
