/* The part of NVML's interface that the simulated library supports, with names, numbers and layouts of NVIDIA's nvml.h.
 * It is a rewrite because that file may not be redistributed. `Device` and `EventSet` are the opaque handles. */
#ifndef NVML_H
#define NVML_H

#define EXPORT __attribute__((visibility("default")))

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};

enum { NVML_CLOCK_MEM = 2, NVML_CLOCK_VIDEO = 3 };
enum { NVML_GPU_UTILIZATION_SAMPLES = 1 };
enum { NVML_VALUE_TYPE_UNSIGNED_INT = 1 };
#define NVML_EVENT_TYPE_XID 0x8ull
#define NVML_NO_INSTANCE 0xFFFFFFFFu /* id for a GPU without MIG */

typedef const struct gpu *Device;
typedef struct event_set *EventSet;

typedef struct {
    unsigned gpu, memory; /* percent */
} Utilization;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
#define MEMORY_V2 (sizeof(MemoryV2) | 2u << 24)

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} ProcessInfo;

typedef struct {
    unsigned long long timestamp; /* microseconds */
    union {
        double as_double;
        unsigned as_unsigned;
        unsigned long long as_unsigned_long_long;
    } value;
} Sample;

typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} EventData;

#endif
