"""DCGM_FI_DEV_XID_ERRORS: the code of the last XID error, and dcgm-exporter's text for it."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.dcgm.labels import dcgm_metrics
from rankscope_exporter.exposition.metric import MetricTable, Values, whole
from rankscope_exporter.gpu.xid_watcher import Xids

# Names in NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors) of the codes that `gpu/collectors/xid.py` exports
# from the start. dcgm-exporter also uses "Unknown Error" for codes that it does not know; `err_code` has the code.
MESSAGES = {
    0: "No Error",
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    32: "Invalid or corrupted push buffer stream",
    43: "GPU stopped processing",
    45: "Preemptive cleanup, due to previous errors",
    46: "GPU stopped processing",
    48: "Double Bit ECC Error",
    61: "Internal micro-controller breakpoint/warning",
    62: "Internal micro-controller halt",
    63: "ECC page retirement or row remapping recording event",
    64: "ECC page retirement or row remapper recording failure",
    68: "NVDEC0 Exception",
    69: "Graphics Engine class error",
    74: "NVLINK Error",
    79: "GPU has fallen off the bus",
    92: "High single-bit ECC error rate",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
    119: "GSP RPC Timeout",
    120: "GSP Error",
    121: "C2C Link Error",
    122: "SPI PMU RPC Read Failure",
    140: "Unrecovered ECC Error",
}


def last_code(times: Mapping[int, float]) -> int:
    """Return the code with the latest unix time; 0 if there is none."""
    return max(times, key=times.__getitem__, default=0)


def _last_error(xids: Xids) -> Values:
    """Return the last code by code and text; None if the driver does not report XID errors."""
    code = last_code(xids.last)
    return None if xids.counts is None else {(str(code), MESSAGES.get(code, "Unknown Error")): code}


XIDS: MetricTable[Xids, Xids] = dcgm_metrics(whole)
METRIC = XIDS.gauge(
    "DEV_XID_ERRORS",
    "Code of the last XID error since the exporter started, 0 if there was none.",
    _last_error,
    "err_code",
    "err_msg",
)
