#!/bin/sh
# Slurm prolog and epilog: write a file for each GPU with its jobs, one job per line.
#
# In slurm.conf, with PrologFlags=Alloc, so that it runs when the job gets its GPUs and not at its first step:
#
#     Prolog=/etc/slurm/prolog.d/*
#     Epilog=/etc/slurm/epilog.d/*
#
# Install this file in both directories. Then: rankscope-exporter --collector.allocation.slurm-dir=/run/rankscope-slurm
# (or dcgm-exporter --hpc-job-mapping-dir=…, which shows the whole line as the job, and reads only files named by number).
#
# With AutoDetect=nvml, Slurm passes the UUIDs of MIG devices as CUDA_VISIBLE_DEVICES, and from 25.11 on those of all GPUs.
# Files are then named by UUID, since SLURM_JOB_GPUS numbers the MIG devices of a node, or the GPUs in gres.conf. The epilog
# removes the job from all files: the devices may have other names by then.
#
# A line has the job's number and its other fields: `4711 uid=1001 user=alice account=physics partition=gpu
# sluid=s9G5M8BD1KND00` (the last from Slurm 26.05 on, which names cgroups by it). slurmd does not pass the job's name to
# a prolog. A failing prolog drains the node, so this one never fails.
#
# Without accounting, users choose the text of an account. Blanks and characters that are not printable ASCII become `?`,
# because a line break would look like another job, which no epilog removes. The exporter reads 4096 bytes of a file, so
# fields are cut off after 64 bytes.

PATH=/usr/bin:/bin
DIR=${RANKSCOPE_SLURM_DIR:-/run/rankscope-slurm}
umask 022 # the exporter runs as another user
set -f    # no globbing

field() {
    [ -z "$2" ] || printf ' %s=%.64s' "$1" "$(printf '%s' "$2" | LC_ALL=C tr -c '\041-\176' '?')"
}

with_this_job() {
    printf '%s' "$SLURM_JOB_ID"
    field uid "$SLURM_JOB_UID"
    field user "$SLURM_JOB_USER"
    field account "$SLURM_JOB_ACCOUNT"
    field partition "$SLURM_JOB_PARTITION"
    field sluid "$SLURM_JOB_SLUID"
    echo
    other_jobs "$1"
}

other_jobs() {
    [ ! -f "$DIR/$1" ] || grep -a -v -x -e "$SLURM_JOB_ID" -e "$SLURM_JOB_ID .*" -- "$DIR/$1"
}

# Print the names of the job's GPUs. Drivers before 470 have MIG-GPU-<uuid>/<gpu instance>/<compute instance>.
gpus() {
    case "$CUDA_VISIBLE_DEVICES" in
        *GPU-* | *MIG-*) printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | sed 's:^MIG-\(GPU-.*\)/.*/.*:\1:' ;;
        *) printf '%s' "$SLURM_JOB_GPUS" | tr ',' '\n' ;;
    esac
}

# Print the names of the files that name the job.
files() {
    find "$DIR" -maxdepth 1 -type f ! -name '.*' \
        -exec grep -a -l -x -e "$SLURM_JOB_ID" -e "$SLURM_JOB_ID .*" -- {} + | sed 's:.*/::'
}

# Write to a temporary file first, so that no reader sees half of the content. On a full disk the old file stays.
keep() {
    content=$("$1" "$2")
    if [ -z "$content" ]; then
        rm -f "$DIR/$2"
    elif printf '%s\n' "$content" >"$DIR/.$2.new"; then
        mv -f "$DIR/.$2.new" "$DIR/$2"
    else
        rm -f "$DIR/.$2.new"
    fi
}

case "$SLURM_JOB_ID" in '' | *[!0-9_+]*) exit 0 ;; esac
[ -n "$SLURM_JOB_GPUS" ] || [ -d "$DIR" ] || exit 0
# Only root may open the lock: any user who can open a file can lock it, and block every prolog.
mkdir -p "$DIR" && (umask 077 && : >>"$DIR/.lock" && chmod 600 "$DIR/.lock") || exit 0
exec 9>>"$DIR/.lock" # one at a time: jobs that share a GPU may start and end together
flock -w 5 9
case "$SLURM_SCRIPT_CONTEXT" in
    prolog*) names=$(gpus) change=with_this_job ;;
    epilog*) names=$(files) change=other_jobs ;;
esac
for gpu in $names; do
    case "$gpu" in [!0-9A-Za-z]* | *[!0-9A-Za-z-]*) ;; *) keep "$change" "$gpu" ;; esac # a file name, not a path
done
exit 0
