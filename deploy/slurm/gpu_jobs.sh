#!/bin/sh
# Slurm's prolog and epilog in one: keeps a file for each GPU with the jobs that have it, a job a line.
#
# In slurm.conf, with PrologFlags=Alloc so that it runs as soon as the job has its GPUs and not at its first step:
#
#     Prolog=/etc/slurm/prolog.d/*
#     Epilog=/etc/slurm/epilog.d/*
#
# and this file in both directories. Then: rankscope-exporter --collector.allocation.slurm-dir=/run/rankscope-slurm
# (or dcgm-exporter --hpc-job-mapping-dir=…, which shows the whole line as the job).
#
# slurmd gives SLURM_JOB_GPUS (numbers of the GPUs), SLURM_JOB_ID and SLURM_JOB_USER; the job's name not in every
# version. A failing prolog drains the node, so this one never fails: who has a GPU is not worth that.

PATH=/usr/bin:/bin
DIR=${RANKSCOPE_SLURM_DIR:-/run/rankscope-slurm}

with_this_job() {
    echo "$SLURM_JOB_ID $SLURM_JOB_USER $SLURM_JOB_NAME"
    other_jobs "$1"
}

other_jobs() {
    [ ! -f "$DIR/$1" ] || grep -v -x -e "$SLURM_JOB_ID" -e "$SLURM_JOB_ID .*" "$DIR/$1"
}

# The new content under another name first, so that nobody reads half of it.
keep() {
    "$1" "$2" >"$DIR/.$2.new"
    if [ -s "$DIR/.$2.new" ]; then mv "$DIR/.$2.new" "$DIR/$2"; else rm -f "$DIR/.$2.new" "$DIR/$2"; fi
}

[ -n "$SLURM_JOB_ID" ] && [ -n "$SLURM_JOB_GPUS" ] || exit 0
mkdir -p "$DIR" && : >>"$DIR/.lock" || exit 0
exec 9>>"$DIR/.lock" # one at a time: jobs that share a GPU may begin and end together
flock -w 5 9
for gpu in $(echo "$SLURM_JOB_GPUS" | tr ',' ' '); do
    case "$SLURM_SCRIPT_CONTEXT" in
        prolog*) keep with_this_job "$gpu" ;;
        epilog*) keep other_jobs "$gpu" ;;
    esac
done
exit 0
