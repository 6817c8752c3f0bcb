/* NVML calls for one GPU: one function per symbol, as in simulation/gpu_calls.py. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "library.h"

EXPORT int nvmlDeviceGetName(Device device, char *buffer, unsigned size)
{
    BEGIN(device);
    snprintf(buffer, size, "%s", table->name);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(Device device, char *buffer, unsigned size)
{
    BEGIN(device);
    snprintf(buffer, size, "%s", device->uuid);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetIndex(Device device, unsigned *index)
{
    BEGIN(device);
    *index = (unsigned)(device - ENTRY(gpu, gpus_at, 0));
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info)
{
    BEGIN(device);
    memset(info, 0, sizeof *info);
    memcpy(info->bus_id, device->bus_id, sizeof info->bus_id);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetPerformanceState(Device device, unsigned *state)
{
    BEGIN(device);
    *state = is_idle(device, t) ? 8 : 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(Device device, Utilization *rates)
{
    BEGIN(device);
    unsigned busy = utilization(device, t);
    *rates = (Utilization){busy, (unsigned)nearbyint(busy * 0.5)}; // ENGINES of simulation/gpu_calls.py
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(Device device, Memory *info)
{
    BEGIN(device);
    info->total = (unsigned long long)table->memory;
    info->used = (unsigned long long)(state(device, t)->memory_used + table->reserved);
    info->free = info->total - info->used;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *info)
{
    BEGIN(device);
    if (info->version != MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    info->total = (unsigned long long)table->memory;
    info->reserved = (unsigned long long)table->reserved;
    info->used = (unsigned long long)state(device, t)->memory_used;
    info->free = info->total - info->reserved - info->used;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts)
{
    BEGIN(device);
    *milliwatts = (unsigned)nearbyint(power(device, t) * 1000);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatts)
{
    BEGIN(device);
    *milliwatts = (unsigned)nearbyint(table->power_max * 1000);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *millijoules)
{
    BEGIN(device);
    *millijoules = (unsigned long long)nearbyint(energy(device, t) * 1000);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius)
{
    BEGIN(device);
    (void)sensor;
    *celsius = (unsigned)nearbyint(temperature(device, t));
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetClockInfo(Device device, unsigned domain, unsigned *megahertz)
{
    BEGIN(device);
    if (domain == NVML_CLOCK_VIDEO)
        return NVML_ERROR_NOT_SUPPORTED;
    *megahertz = (unsigned)nearbyint(domain == NVML_CLOCK_MEM ? table->memory_clock : sm_clock(device, t));
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMaxClockInfo(Device device, unsigned domain, unsigned *megahertz)
{
    BEGIN(device);
    if (domain == NVML_CLOCK_VIDEO)
        return NVML_ERROR_NOT_SUPPORTED;
    *megahertz = (unsigned)nearbyint(domain == NVML_CLOCK_MEM ? table->memory_clock : table->sm_clock);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *mask)
{
    BEGIN(device);
    *mask = (unsigned long long)reasons(device, t);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *mask)
{
    BEGIN(device);
    *mask = (unsigned long long)reasons(device, t);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *types)
{
    BEGIN(device);
    *types = NVML_EVENT_TYPE_XID;
    return NVML_SUCCESS;
}

static int fill_processes(const struct segment *segment, int graphics, unsigned *count, ProcessInfo *infos)
{
    unsigned capacity = infos ? *count : 0;
    *count = 0;
    for (int64_t number = 0; number < segment->processes; number++) {
        const struct process *process = ENTRY(process, processes_at, segment->first_process + number);
        if (!(graphics ? process->is_graphics : process->is_compute))
            continue;
        if (*count < capacity)
            infos[*count] = (ProcessInfo){(unsigned)process->pid, (unsigned long long)process->memory, NVML_NO_INSTANCE,
                                          NVML_NO_INSTANCE};
        ++*count;
    }
    return *count > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *infos)
{
    BEGIN(device);
    return fill_processes(state(device, t), 0, count, infos);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *infos)
{
    BEGIN(device);
    return fill_processes(state(device, t), 1, count, infos);
}

EXPORT int nvmlDeviceGetSamples(Device device, unsigned kind, unsigned long long since_us, unsigned *value_type,
                                unsigned *count, Sample *samples)
{
    BEGIN(device);
    if (kind != NVML_GPU_UTILIZATION_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    int64_t last = (int64_t)(t / table->sample_period + 1e-6), first = last - table->ring_depth + 1;
    unsigned capacity = samples ? *count : ~0u;
    *count = 0;
    for (int64_t period = first < 1 ? 1 : first; period <= last && *count < capacity; period++) {
        double end = table->start_unix + (double)period * table->sample_period;
        unsigned long long stamp = (unsigned long long)nearbyint(end * 1e6);
        if (stamp <= since_us)
            continue;
        if (samples)
            samples[*count] = (Sample){stamp, {.as_unsigned = (unsigned)percent(device, period)}};
        ++*count;
    }
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    return *count ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
