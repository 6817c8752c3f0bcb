"""The Pod Security Standards of Kubernetes 1.34 (https://kubernetes.io/docs/concepts/security/pod-security-standards/)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

PRIVILEGED, BASELINE, RESTRICTED = "privileged", "baseline", "restricted"
CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
CONFINED = {"RuntimeDefault", "Localhost"}

Manifest = dict[str, Any]


def level(pod: Manifest) -> str:
    """Return the strictest level that a pod template meets."""
    if any(baseline(pod)):
        return PRIVILEGED
    return BASELINE if any(restricted(pod)) else RESTRICTED


def containers(pod: Manifest) -> list[Manifest]:
    return [one for kind in ("initContainers", "containers") for one in pod["spec"].get(kind, [])]


def baseline(pod: Manifest) -> Iterator[str]:
    """Yield the fields that violate the level `baseline`."""
    spec = pod["spec"]
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    yield from (f"hostPath {volume['name']}" for volume in spec.get("volumes", []) if "hostPath" in volume)
    for name, value in pod.get("metadata", {}).get("annotations", {}).items():
        if name.startswith(APPARMOR) and not re.fullmatch(r"|runtime/default|localhost/.*", value):
            yield f"annotation {name}"
    context = spec.get("securityContext", {})
    yield from (f"sysctl {one['name']}" for one in context.get("sysctls", []) if one["name"] not in SYSCTLS)
    yield from _of_each_context("the pod", context)
    for container in containers(pod):
        yield from _of_a_container(container, container.get("securityContext", {}))


def _of_a_container(container: Manifest, context: Manifest) -> Iterator[str]:
    name = container["name"]
    yield from _of_each_context(name, context)
    if context.get("privileged"):
        yield f"{name}: privileged"
    if set(context.get("capabilities", {}).get("add", [])) - CAPABILITIES:
        yield f"{name}: capabilities"
    if context.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{name}: hostPort"
    hooks = [container.get(f"{probe}Probe", {}) for probe in ("liveness", "readiness", "startup")]
    hooks += container.get("lifecycle", {}).values()
    if any(hook.get(kind, {}).get("host") for hook in hooks for kind in ("httpGet", "tcpSocket")):
        yield f"{name}: host of a probe or hook"


def _of_each_context(name: str, context: Manifest) -> Iterator[str]:
    """Yield what neither a pod's nor a container's security context may have."""
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{name}: hostProcess"
    for profile in ("appArmorProfile", "seccompProfile"):
        if context.get(profile, {}).get("type", "RuntimeDefault") not in CONFINED:
            yield f"{name}: {profile}"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{name}: seLinuxOptions"


def restricted(pod: Manifest) -> Iterator[str]:
    """Yield the fields that violate the level `restricted`, in addition to those of `baseline`."""
    yield from baseline(pod)
    spec = pod["spec"]
    own = spec.get("securityContext", {})
    for volume in spec.get("volumes", []):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volume {volume['name']}"
    if own.get("runAsUser") == 0:
        yield "the pod: runAsUser"
    for container in containers(pod):
        name, context = container["name"], container.get("securityContext", {})
        capabilities = context.get("capabilities", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        if {**own, **context}.get("runAsNonRoot") is not True:
            yield f"{name}: runAsNonRoot"
        if context.get("runAsUser") == 0:
            yield f"{name}: runAsUser"
        if {**own, **context}.get("seccompProfile", {}).get("type") not in CONFINED:
            yield f"{name}: seccompProfile"
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"{name}: capabilities"
