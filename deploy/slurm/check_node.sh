#!/bin/sh
# Slurm prolog: check the job's GPUs and the node, and drain the node if a check fails. In slurm.conf:
#
#     Prolog=/etc/slurm/prolog.d/*
#     PrologFlags=Alloc
#
# Set the command, and the exit statuses that drain, in /etc/default/rankscope-check-node:
#
#     CHECK="/opt/rankscope/bin/rankscope check-node --python /opt/pytorch/bin/python"
#     DRAIN="1 3"
#
# 1: a check failed. 3: a process is still on a GPU of the job; do not add it if jobs share GPUs. Anything else never drains:
# no GPU, no package, a check that was killed. What was found goes to slurmd's log and to syslog.

CHECK="/opt/rankscope/bin/rankscope check-node"
DRAIN=1
LONGEST=90 # seconds; the check ends within a minute
config=${RANKSCOPE_CHECK_CONFIG:-/etc/default/rankscope-check-node}
# `.` ends this shell if the file is missing or has a syntax error.
[ ! -e "$config" ] || { sh -n "$config" && . "$config"; }

[ -n "$SLURM_JOB_GPUS" ] || exit 0
# CHECK consists of several words.
# shellcheck disable=SC2086
found=$(timeout -k 5 "$LONGEST" $CHECK 2>&1 </dev/null)
status=$?
printf '%s\n' "$found" >&2
printf '%s\n' "$found" | logger -t rankscope-check-node 2>/dev/null
case " $DRAIN " in *" $status "*) exit "$status" ;; esac
exit 0
