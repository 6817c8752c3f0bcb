/* Calls used only by other exporters, found by running nvitop-exporter. A simulated GPU has an idle media engine and no
 * MIG instances, fan, NVLink or PCIe traffic. Reading PCIe throughput takes 20 ms, as in the real call, which measures
 * for that time. */
#include <math.h>

#include "library.h"

int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatts);

EXPORT int nvmlDeviceGetPowerManagementLimit(Device device, unsigned *milliwatts)
{
    return nvmlDeviceGetEnforcedPowerLimit(device, milliwatts);
}

static int idle_engine(unsigned *share, unsigned *period_us)
{
    *share = 0;
    *period_us = (unsigned)nearbyint(table->sample_period * 1e6);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetEncoderUtilization(Device device, unsigned *share, unsigned *period_us)
{
    BEGIN(device);
    return idle_engine(share, period_us);
}

EXPORT int nvmlDeviceGetDecoderUtilization(Device device, unsigned *share, unsigned *period_us)
{
    BEGIN(device);
    return idle_engine(share, period_us);
}

EXPORT int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending)
{
    BEGIN(device);
    *current = *pending = 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetPcieThroughput(Device device, unsigned direction, unsigned *kilobytes_per_second)
{
    BEGIN(device);
    (void)direction;
    sleep_for(0.02);
    *kilobytes_per_second = 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetFanSpeed(Device device, unsigned *percent_of_maximum)
{
    BEGIN(device);
    (void)percent_of_maximum;
    return NVML_ERROR_NOT_SUPPORTED; /* as on all server GPUs */
}

EXPORT int nvmlDeviceGetFieldValues(Device device, int count, void *values)
{
    BEGIN(device);
    (void)count, (void)values;
    return NVML_ERROR_NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetProcessUtilization(Device device, void *samples, unsigned *count, unsigned long long since_us)
{
    BEGIN(device);
    (void)samples, (void)count, (void)since_us;
    return NVML_ERROR_NOT_FOUND; /* no process has been active since then */
}
