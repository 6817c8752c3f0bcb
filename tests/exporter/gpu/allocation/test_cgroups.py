"""Container cgroups by creator. The source of a path is the code or report that shows it."""

from __future__ import annotations

import pytest

from rankscope_exporter.gpu.allocation.processes import container_of_cgroup

ID, OUTER, POD = "c0ffee" * 10 + "c0de", "a" * 64, "0f9a2b6c-1d3e-4f5a-8b7c-9d0e1f2a3b4c"
UNIT = POD.replace("-", "_")
SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNIT}.slice"
USER = "/user.slice/user-1000.slice/user@1000.service/user.slice"

# moby: daemon/oci_linux.go. runc: libcontainer/cgroups/systemd. kubelet: pkg/kubelet/cm. containerd: internal/cri.
# cri-o: internal/config/cgmgr. podman: libpod/container_internal_linux.go. kind: its node image's entrypoint.
PATHS = {
    "docker, cgroupfs (moby)": f"/docker/{ID}",
    "docker, systemd (runc)": f"/system.slice/docker-{ID}.scope",
    "docker with its own init cgroup": f"/system.slice/docker-{ID}.scope/init",
    "docker, systemd in the container": f"/docker/{ID}/system.slice/sshd.service",
    "docker, rootless": f"{USER}/docker-{ID}.scope",
    "docker, other parent (--cgroup-parent)": f"/jobs/7/{ID}",
    "docker in docker": f"/docker/{OUTER}/docker/{ID}",
    "docker in docker, systemd": f"/system.slice/docker-{OUTER}.scope/docker/{ID}",
    "dockershim, cgroupfs": f"/kubepods/burstable/pod{POD}/{ID}",
    "dockershim, systemd": f"{SLICE}/docker-{ID}.scope",
    "containerd, cgroupfs": f"/kubepods/besteffort/pod{POD}/{ID}",
    "containerd, cgroupfs, guaranteed": f"/kubepods/pod{POD}/{ID}",
    "containerd, systemd": f"{SLICE}/cri-containerd-{ID}.scope",
    "containerd, systemd, guaranteed": f"/kubepods.slice/kubepods-pod{UNIT}.slice/cri-containerd-{ID}.scope",
    "containerd with cgroupfs, kubelet with systemd (kubernetes/kubernetes#106514)": (
        f"/system.slice/containerd.service/kubepods-burstable-pod{UNIT}.slice:cri-containerd:{ID}"
    ),
    "mixed drivers, cgroup v1 (falcosecurity/libs#63)": f"/kubepods-besteffort-pod{UNIT}.slice:cri-containerd:{ID}",
    "mixed drivers, nested slice": f"{SLICE}/kubepods-burstable-pod{UNIT}.slice:cri-containerd:{ID}",
    "containerd, own namespace (ctr, nerdctl)": f"/default/{ID}",
    "nerdctl, systemd": f"/system.slice/nerdctl-{ID}.scope",
    "nerdctl, rootless": f"{USER}/nerdctl-{ID}.scope",
    "k3s and rke2, containerd below the service": f"/system.slice/k3s.service/kubepods/burstable/pod{POD}/{ID}",
    "cri-o, systemd": f"{SLICE}/crio-{ID}.scope",
    "cri-o, systemd, with a cgroup below (crun)": f"{SLICE}/crio-{ID}.scope/container",
    "cri-o, cgroupfs": f"/kubepods/burstable/pod{POD}/crio-{ID}",
    "cri-o, relative path": f"/../../kubepods-pod{UNIT}.slice/crio-{ID}.scope/container",
    "cri-o with cgroupfs, kubelet with systemd": f"/kubepods-pod{UNIT}.slice:crio:{ID}",
    "podman, systemd": f"/machine.slice/libpod-{ID}.scope",
    "podman, with a cgroup below (crun)": f"/machine.slice/libpod-{ID}.scope/container",
    "podman, cgroupfs": f"/libpod_parent/libpod-{ID}",
    "podman, pod": f"/machine.slice/machine-libpod_pod_{OUTER}.slice/libpod-{ID}.scope",
    "podman, rootless": f"{USER}/libpod-{ID}.scope/container",
    "podman in a unit (--cgroups=split)": f"/system.slice/train.service/libpod-payload-{ID}",
    "kind, cgroup v1": f"/docker/{OUTER}/kubelet/kubepods/burstable/pod{POD}/{ID}",
    "kind, cgroup v2": (
        f"/system.slice/docker-{OUTER}.scope/kubelet.slice/kubelet-kubepods.slice"
        f"/kubelet-kubepods-pod{UNIT}.slice/cri-containerd-{ID}.scope"
    ),
    "kind, containerd without systemd": (
        f"/docker/{OUTER}/system.slice/containerd.service/kubepods-pod{UNIT}.slice:cri-containerd:{ID}"
    ),
    "kind, own namespace": f"/kubelet.slice/kubelet-kubepods.slice/cri-containerd-{ID}.scope",
    "Amazon ECS": f"/ecs/train/0123456789abcdef0123456789abcdef/{ID}",
    "Amazon ECS, systemd": f"/ecstasks.slice/ecstasks-0123456789abcdef0123456789abcdef.slice/docker-{ID}.scope",
    "Slurm around podman": f"/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/libpod-{ID}.scope",
    "removed cgroup (cgroups(7))": f"/docker/{ID} (deleted)",
}

NO_CONTAINER = {
    "session": "/user.slice/user-1000.slice/session-3.scope",
    "root": "/",
    "Slurm job": "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
    "container runtime": "/system.slice/containerd.service",
    "podman's monitor": f"/machine.slice/libpod-conmon-{ID}.scope",
    "podman's monitor, cgroupfs": f"/libpod_parent/libpod-conmon-{ID}",
    "cri-o's monitor": f"{SLICE}/crio-conmon-{ID}.scope",
    "podman's pod": f"/machine.slice/machine-libpod_pod_{ID}.slice",
    "LXC": "/lxc.payload.train/ns",
    "longer than an id": f"/app.slice/{ID}ff",
    "uppercase": f"/docker/{ID.upper()}",
    "file name": f"/app.slice/{ID}.service",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("line", ["0::{}\n", "0::{}", "12:cpu,cpuacct:{0}\n11:pids:{0}\n1:name=systemd:{0}\n"])
def test_a_process_is_in_the_innermost_container_of_its_cgroup(line: str, path: str) -> None:
    assert container_of_cgroup(line.format(path)) == ID


@pytest.mark.parametrize("path", NO_CONTAINER.values(), ids=NO_CONTAINER)
def test_other_cgroups_have_no_container(path: str) -> None:
    assert container_of_cgroup(f"0::{path}\n") == ""


def test_a_monitor_in_a_container_belongs_to_that_container() -> None:
    assert container_of_cgroup(f"0::/docker/{OUTER}/machine.slice/libpod-conmon-{ID}.scope\n") == OUTER


@pytest.mark.parametrize(
    "cgroup",
    [
        f"12:cpu:/docker/{OUTER}/docker/{ID}\n11:rdma:/\n1:name=systemd:/docker/{OUTER}\n0::/system.slice\n",
        f"12:rdma:/\n1:name=systemd:/docker/{OUTER}\n3:cpu:/docker/{OUTER}/docker/{ID}\n",
    ],
)
def test_the_deepest_hierarchy_of_cgroup_v1_is_used(cgroup: str) -> None:
    assert container_of_cgroup(cgroup) == ID


def test_an_empty_cgroup_has_no_container() -> None:
    assert container_of_cgroup("") == ""
