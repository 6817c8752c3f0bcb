#!/bin/sh
# Slurm EpilogSlurmctld: store a job's report as its AdminComment, for `sacct -j 4711 -o AdminComment%1000`. In slurm.conf:
#
#     EpilogSlurmctld=/etc/slurm/rankscope_job_report.sh
#
# On a cluster of one node it can be an Epilog, too. It needs accounting: without it, Slurm does not change ended jobs.
# Set the command in /etc/default/rankscope-report:
#
#     REPORT="/opt/rankscope/bin/rankscope report --url http://prometheus:9090 --price 2.50"
#
# The job waits for its epilog, so the report is made in the background, after the last scrape. Slurm kills the processes in
# an epilog's process group: the epilog ends when the background process has its own session and has closed its output.

if [ "$RANKSCOPE_REPORT_NOW" != yes ]; then
    export RANKSCOPE_REPORT_NOW=yes
    : "$(setsid --fork "$0" </dev/null 2>/dev/null)"
    exit 0
fi
exec >/dev/null

REPORT="/opt/rankscope/bin/rankscope report"
WAIT=20 # seconds: a scrape interval and some margin
config=${RANKSCOPE_REPORT_CONFIG:-/etc/default/rankscope-report}
# `.` ends this shell if the file is missing or has a syntax error.
[ ! -e "$config" ] || { sh -n "$config" && . "$config"; }

case "$SLURM_JOB_ID$SLURM_JOB_UID" in '' | *[!0-9]*) exit 0 ;; esac
sleep "$WAIT"
# REPORT consists of several words.
# shellcheck disable=SC2086
comment=$(timeout 120 $REPORT --slurm-job "$SLURM_JOB_ID" --owner "$SLURM_JOB_UID" --json 2>/dev/null) || exit 0
timeout 60 sacctmgr --immediate modify job where "jobid=$SLURM_JOB_ID" set "AdminComment=$comment"
exit 0
