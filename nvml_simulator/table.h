/* The scenario table written by table.py: its layout, and the quantities of one GPU at one time.
 * Times are seconds since the scenario started. Every field is a multiple of eight bytes, so there is no padding. */
#ifndef TABLE_H
#define TABLE_H

#include <stdint.h>

struct table { /* the header of the file; `…_at` are byte offsets in the file */
    char magic[8];
    double start_unix;
    int64_t gpu_count, gpus_at, segments_at, processes_at, faults_at, xids_at, load_count, loads_at;
    char name[96], driver_version[80];
    int64_t cuda_version, memory, reserved, idle_bit, no_throttling, ring_depth;
    double power_idle, power_max, sm_clock, memory_clock, sample_period, power_window, heat_window;
    double computing_power, waiting_power, idle_temperature, full_load_heating, idle_sm_clock, throttled_clock;
};

struct gpu {
    char uuid[96], bus_id[32];
    int64_t first_segment, segments, first_xid, xids;
};

struct segment { /* state from one time of a GPU's timeline to the next */
    double at, busy, waiting, computed_before, waited_before, temperature; /* temperature: NaN follows the load */
    int64_t memory_used, reasons, lost, first_process, processes, first_fault, faults;
};

struct process {
    int64_t pid, memory, is_compute, is_graphics;
};

struct fault {
    char symbol[64];
    int64_t code; /* 0 is success */
    double blocks;
};

struct xid {
    double at;
    int64_t code;
};

struct load {
    double at;
    int64_t is_loaded;
};

extern const struct table *table;

int map_table(void); /* returns an NVML code; after success `table` is set permanently */
const void *entry(int64_t offset, int64_t number, int64_t size);
double now(void);
int current_load(void); /* number of the current driver load; -1 if unloaded */
void sleep_for(double seconds);

const struct segment *state(const struct gpu *gpu, double t);
double utilized(const struct gpu *gpu, double t);
int percent(const struct gpu *gpu, int64_t period); /* for the sample period that ends at period × its length */
unsigned utilization(const struct gpu *gpu, double t);
double energy(const struct gpu *gpu, double t);
double power(const struct gpu *gpu, double t);
double temperature(const struct gpu *gpu, double t);
double sm_clock(const struct gpu *gpu, double t);
int is_idle(const struct gpu *gpu, double t);
int64_t reasons(const struct gpu *gpu, double t);

#define ENTRY(type, place, number) ((const struct type *)entry(table->place, number, sizeof(struct type)))

#endif
