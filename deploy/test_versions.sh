#!/usr/bin/env bash
# The hook's tests with the oldest torch that is supported and the newest that can be installed: `test_versions.sh PYTHON`.
# Each in an environment of its own below .versions; what needs frameworks, servers or Rankscope installed is left out.
set -euo pipefail

tests=(instrument settings record/{files,ring} timeline/{timeline,groups,exposed_wait,device_clock})
tests+=(process/{identity,manners,manners_interrupted})
tests+=(probes/{data_wait,forward,ddp,collectives,optimizer,amp,checkpoint,h2d_copy,garbage,cuda_memory})

# torch 2.4 has no FSDP2 that trains on a CPU, and may hang as it destroys a gloo group: the destructor holds the GIL and
# joins a thread that waits for it.
not_in_oldest=(
    probes/test_forward.py::test_the_forward_of_an_fsdp2_model_is_forward
    probes/test_collectives.py::test_fsdp2_and_its_clipping_are_seen
    test_settings.py::test_fsdp2_is_told_by_its_parameters
    process/test_manners.py::test_process_groups_that_come_and_go_keep_their_name_and_their_number_grows
    probes/test_checkpoint.py::test_each_rank_of_a_sharded_save_counts_what_it_wrote
)

run() { # a name, what pip installs, and after -- what pytest is told
    local bin=.versions/$1/bin packages=()
    shift
    while [ "$1" != -- ]; do packages+=("$1") && shift; done
    shift
    [ -x "$bin/hypothesis" ] || {
        "$python" -m venv "${bin%/bin}"
        "$bin/pip" install --quiet "${packages[@]}" pytest pytest-timeout hypothesis cloudpickle safetensors
    }
    "$bin/python" -c 'import torch; print("torch", torch.__version__)'
    PATH=$PWD/$bin:$PATH PYTHONPATH=trainer_hooks:exporter:.:grafana \
        "$bin/pytest" -q -p no:cacheprovider "$@" "${tests[@]/#/tests/trainer_hooks/}"
}

python=${1:-python3}
tests=("${tests[@]/%/.py}")
for at in "${!tests[@]}"; do # a/b.py is a/test_b.py
    case ${tests[at]} in
        */*) tests[at]=${tests[at]%/*}/test_${tests[at]##*/} ;;
        *) tests[at]=test_${tests[at]} ;;
    esac
done
run oldest 'torch==2.4.*' 'numpy<2' -- "${not_in_oldest[@]/#/--deselect=tests/trainer_hooks/}"
run newest --upgrade torch numpy --
