#!/bin/sh
# Slurm's TaskProlog: switches the hook on for every task that has a GPU. In slurm.conf:
#
#     TaskProlog=/etc/slurm/rankscope_task_prolog.sh
#
# Slurm puts each line `export NAME=value` that this prints into the task's environment. Where the job's Python has the
# hook (`pip install rankscope`), that is all. For jobs that do not, install it once for all nodes:
#
#     pip install --no-deps --target /opt/rankscope/hook rankscope
#
# That directory comes last on PYTHONPATH, so whatever the user puts there comes first. A Python that is too old for the
# hook prints a warning; one that never imports torch does nothing.
#
# A user opts out with RANKSCOPE=0, in the batch script or when submitting; whatever RANKSCOPE is set to is left alone.
# A TaskProlog that fails ends the task, so this one never fails.

HOOK=${RANKSCOPE_HOOK:-/opt/rankscope/hook}

[ -z "${RANKSCOPE+set}" ] || exit 0
[ -n "$SLURM_STEP_GPUS$SLURM_JOB_GPUS" ] || exit 0
printf 'export RANKSCOPE=1\n'
[ -d "$HOOK/rankscope" ] || exit 0
case "$PYTHONPATH" in
    *'
'*) ;; # not one line
    *) printf 'export PYTHONPATH=%s\n' "${PYTHONPATH:+$PYTHONPATH:}$HOOK" ;;
esac
exit 0
