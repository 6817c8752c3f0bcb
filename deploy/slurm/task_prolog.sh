#!/bin/sh
# Slurm TaskProlog: enable the hook for every task that has a GPU. In slurm.conf:
#
#     TaskProlog=/etc/slurm/rankscope_task_prolog.sh
#
# Slurm adds each printed line `export NAME=value` to the task's environment. If the job's Python has the hook
# (`pip install rankscope`), nothing else is needed. For other jobs, install it once on all nodes:
#
#     pip install --no-deps --target /opt/rankscope/hook rankscope
#
# That directory is last on PYTHONPATH, after the user's own entries. A Python that is too old for the hook prints a
# warning; one that never imports torch does nothing.
#
# A user opts out with RANKSCOPE=0, in the batch script or when submitting; this script never changes a value that is set.
# A failing TaskProlog ends the task, so this one never fails.

HOOK=${RANKSCOPE_HOOK:-/opt/rankscope/hook}

[ -z "${RANKSCOPE+set}" ] || exit 0
[ -n "$SLURM_STEP_GPUS$SLURM_JOB_GPUS" ] || exit 0
printf 'export RANKSCOPE=1\n'
[ -d "$HOOK/rankscope" ] || exit 0
case "$PYTHONPATH" in
    *'
'*) ;; # several lines
    *) printf 'export PYTHONPATH=%s\n' "${PYTHONPATH:+$PYTHONPATH:}$HOOK" ;;
esac
exit 0
