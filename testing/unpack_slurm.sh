#!/bin/sh
# Unpack the Slurm of another Debian release into a directory, to run it without installing it:
#
#     testing/unpack_slurm.sh sid /tmp/slurm-sid && python -m validation.slurm --root /tmp/slurm-sid
#
# Its programs use the unpacked loader and libraries. Needs apt and patchelf.
set -eu
suite=$1
mkdir -p "$2"
root=$(cd "$2" && pwd)
apt=$root/.apt
mkdir -p "$apt/lists/partial" "$apt/archives/partial"
: >"$apt/status"
mirror=$(sed -n 's/^URIs: *//p; s/^deb \(\[.*\] \)\?\(http[^ ]*\) .*/\2/p' /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$apt/sources.list"
cat >"$apt/apt.conf" <<END
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
APT::Sandbox::User "root";
END
export APT_CONFIG="$apt/apt.conf"
apt-get update -qq
apt-get install -qq --download-only --yes --no-install-recommends slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins
for package in "$apt"/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
libraries=$root/usr/lib/x86_64-linux-gnu
loader=$(find "$root/usr/lib64" "$root/lib64" -name 'ld-linux-x86-64.so.2' 2>/dev/null | head -n 1)
for program in "$root"/usr/sbin/slurm* "$root"/usr/sbin/munged "$root"/usr/bin/s[a-z]* "$root"/usr/bin/*munge; do
    [ -f "$program" ] && [ ! -L "$program" ] || continue
    patchelf --force-rpath --set-rpath "$libraries:$libraries/slurm-wlm" --set-interpreter "$loader" "$program" 2>/dev/null || true
done
