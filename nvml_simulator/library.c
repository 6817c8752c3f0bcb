/* The connection: initialization, handles, and event sets for XIDs. */
#include "library.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVENT_POLL 0.02 /* seconds */
#define MAX_GPUS 64     /* as in scenario.py */

struct event_set {
    int64_t delivered[MAX_GPUS]; /* number of XIDs by GPU; -1 if the GPU is not registered */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int connections, connected_to;

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (map_table() != NVML_SUCCESS || current_load() < 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    pthread_mutex_lock(&lock);
    connections++;
    connected_to = current_load();
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

EXPORT int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

int check_connection(void)
{
    if (map_table() != NVML_SUCCESS || current_load() < 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    pthread_mutex_lock(&lock);
    int is_connected = connections > 0 && connected_to == current_load();
    pthread_mutex_unlock(&lock);
    return is_connected ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

EXPORT int nvmlShutdown(void)
{
    int error = check_connection();
    if (error)
        return error;
    pthread_mutex_lock(&lock);
    connections--;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(int code)
{
    static __thread char text[32];
    snprintf(text, sizeof text, "NVML code %d", code);
    return text;
}

static const struct fault *find_fault(Device device, const char *symbol)
{
    const struct segment *segment = state(device, now());
    for (int64_t number = 0; number < segment->faults; number++) {
        const struct fault *fault = ENTRY(fault, faults_at, segment->first_fault + number);
        if (strcmp(fault->symbol, symbol) == 0)
            return fault;
    }
    return NULL;
}

int check_device(Device device, const char *symbol, double *t)
{
    int error = check_connection();
    if (error)
        return error;
    if (device < ENTRY(gpu, gpus_at, 0) || device >= ENTRY(gpu, gpus_at, table->gpu_count))
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct fault *fault = find_fault(device, symbol);
    if (fault && fault->blocks > 0)
        sleep_for(fault->blocks);
    *t = now();
    if (state(device, *t)->lost)
        return NVML_ERROR_GPU_IS_LOST;
    fault = find_fault(device, symbol);
    return fault ? (int)fault->code : NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    int error = check_connection();
    if (!error)
        *count = (unsigned)table->gpu_count;
    return error;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
    int error = check_connection();
    if (error)
        return error;
    if (index >= table->gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    double t;
    *device = ENTRY(gpu, gpus_at, index);
    return check_device(*device, __func__, &t);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
    int error = check_connection();
    for (int64_t index = 0; !error && index < table->gpu_count; index++) {
        *device = ENTRY(gpu, gpus_at, index);
        if (strcmp((*device)->uuid, uuid) == 0)
            return NVML_SUCCESS;
    }
    return error ? error : NVML_ERROR_NOT_FOUND;
}

EXPORT int nvmlSystemGetDriverVersion(char *buffer, unsigned size)
{
    int error = check_connection();
    if (!error)
        snprintf(buffer, size, "%s", table->driver_version);
    return error;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    int error = check_connection();
    if (!error)
        *version = (int)table->cuda_version;
    return error;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlEventSetCreate(EventSet *set)
{
    int error = check_connection();
    if (error)
        return error;
    *set = malloc(sizeof **set);
    for (int index = 0; index < MAX_GPUS; index++)
        (*set)->delivered[index] = -1;
    return NVML_SUCCESS;
}

EXPORT int nvmlEventSetFree(EventSet set)
{
    free(set);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceRegisterEvents(Device device, unsigned long long types, EventSet set)
{
    if (types & ~NVML_EVENT_TYPE_XID)
        return NVML_ERROR_NOT_SUPPORTED;
    BEGIN(device);
    int64_t *delivered = &set->delivered[device - ENTRY(gpu, gpus_at, 0)];
    if (*delivered < 0) /* a new registration skips earlier XIDs */
        for (*delivered = 0; *delivered < device->xids; ++*delivered)
            if (ENTRY(xid, xids_at, device->first_xid + *delivered)->at > t)
                break;
    return NVML_SUCCESS;
}

static int take_event(EventSet set, EventData *data)
{
    for (int64_t index = 0; index < table->gpu_count; index++) {
        Device device = ENTRY(gpu, gpus_at, index);
        int64_t *delivered = &set->delivered[index];
        if (*delivered < 0 || *delivered >= device->xids)
            continue;
        const struct xid *xid = ENTRY(xid, xids_at, device->first_xid + *delivered);
        if (xid->at > now())
            continue;
        ++*delivered;
        *data = (EventData){device, NVML_EVENT_TYPE_XID, (unsigned long long)xid->code, NVML_NO_INSTANCE, NVML_NO_INSTANCE};
        return 1;
    }
    return 0;
}

EXPORT int nvmlEventSetWait_v2(EventSet set, EventData *data, unsigned timeout_ms)
{
    for (double waited = 0;; waited += EVENT_POLL) {
        int error = check_connection();
        if (error)
            return error;
        if (take_event(set, data))
            return NVML_SUCCESS;
        if (waited >= timeout_ms / 1000.0)
            return NVML_ERROR_TIMEOUT;
        sleep_for(EVENT_POLL);
    }
}
