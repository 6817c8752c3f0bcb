#!/bin/sh
# Slurm MailProg: add the job's report to the mails that a user gets with `sbatch --mail-type=END`. In slurm.conf:
#
#     MailProg=/etc/slurm/rankscope_mail.sh
#
# Set the commands in /etc/default/rankscope-report:
#
#     REPORT="/opt/rankscope/bin/rankscope report --url http://prometheus:9090 --price 2.50"
#     MAIL=/usr/bin/mail
#
# Without a report, the mail is sent unchanged.

REPORT="/opt/rankscope/bin/rankscope report"
MAIL=/usr/bin/mail
WAIT=20    # seconds: a scrape interval and some margin
LONGEST=80 # seconds: Slurm kills a MailProg after 120
config=${RANKSCOPE_REPORT_CONFIG:-/etc/default/rankscope-report}
# `.` ends this shell if the file is missing or has a syntax error.
[ ! -e "$config" ] || { sh -n "$config" && . "$config"; }

text=
case "$SLURM_JOB_ID$SLURM_JOB_UID" in
    '' | *[!0-9]*) ;;
    *)
        case "$SLURM_JOB_MAIL_TYPE" in
            Ended | Failed | 'Reached time limit')
                sleep "$WAIT"
                # REPORT consists of several words.
                # shellcheck disable=SC2086
                text=$(timeout "$LONGEST" $REPORT --slurm-job "$SLURM_JOB_ID" --owner "$SLURM_JOB_UID" 2>/dev/null)
                ;;
        esac
        ;;
esac
[ -z "$text" ] || text="$text
"
printf '%s' "$text" | "$MAIL" "$@"
