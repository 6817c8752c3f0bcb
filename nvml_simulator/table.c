/* Maps the table and computes a GPU's quantities as functions of time, as simulation/gpu.py does. */
#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

#define MAGIC "RSNVML01"
#define VARIABLE "RANKSCOPE_NVML_TABLE"

const struct table *table;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void log_error(const char *path, const char *reason)
{
    fprintf(stderr, "simulated libnvidia-ml: %s=%s: %s\n", VARIABLE, path ? path : "", reason);
}

static void map_once(void)
{
    const char *path = getenv(VARIABLE);
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) < 0) {
        log_error(path, path ? strerror(errno) : "not set");
        return;
    }
    void *mapped = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED || (size_t)status.st_size < sizeof(struct table) || memcmp(mapped, MAGIC, 8) != 0)
        log_error(path, "not a scenario table");
    else
        table = mapped;
}

int map_table(void)
{
    pthread_once(&once, map_once);
    return table ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

const void *entry(int64_t offset, int64_t number, int64_t size)
{
    return (const char *)table + offset + number * size;
}

double now(void)
{
    struct timespec clock;
    clock_gettime(CLOCK_REALTIME, &clock);
    return (double)clock.tv_sec + (double)clock.tv_nsec / 1e9 - table->start_unix;
}

void sleep_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        continue;
}

int current_load(void)
{
    int64_t index = 0;
    double t = now();
    while (index + 1 < table->load_count && ENTRY(load, loads_at, index + 1)->at <= t)
        index++;
    return ENTRY(load, loads_at, index)->is_loaded ? (int)index : -1;
}

const struct segment *state(const struct gpu *gpu, double t)
{
    int64_t low = 0, high = gpu->segments; /* binary search for the last segment that starts by t, or the first */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (ENTRY(segment, segments_at, gpu->first_segment + middle)->at <= t)
            low = middle;
        else
            high = middle;
    }
    return ENTRY(segment, segments_at, gpu->first_segment + low);
}

static void spent(const struct gpu *gpu, double t, double *computing, double *waiting)
{
    const struct segment *segment = state(gpu, t);
    double duration = fmax(0.0, t - segment->at);
    *computing = segment->computed_before + segment->busy * duration;
    *waiting = segment->waited_before + segment->waiting * duration;
}

double utilized(const struct gpu *gpu, double t)
{
    double computing, waiting;
    spent(gpu, t, &computing, &waiting);
    return computing + waiting;
}

int percent(const struct gpu *gpu, int64_t period)
{
    double end = (double)period * table->sample_period, start = end - table->sample_period;
    double computed, waited, computed_before, waited_before;
    spent(gpu, end, &computed, &waited);
    spent(gpu, start, &computed_before, &waited_before);
    /* The same order as in Python: another order rounds 39.5 differently. */
    double busy = (computed - computed_before) + (waited - waited_before);
    return (int)fmin(100, nearbyint(100 * busy / (end - start)));
}

unsigned utilization(const struct gpu *gpu, double t)
{
    int64_t last = (int64_t)(t / table->sample_period + 1e-6);
    return last < 1 ? 0 : (unsigned)percent(gpu, last);
}

double energy(const struct gpu *gpu, double t)
{
    double computing, waiting;
    spent(gpu, t, &computing, &waiting);
    double load = table->computing_power * computing + table->waiting_power * waiting;
    return table->power_idle * t + (table->power_max - table->power_idle) * load;
}

double power(const struct gpu *gpu, double t)
{
    double window = fmin(table->power_window, t);
    return window > 0 ? (energy(gpu, t) - energy(gpu, t - window)) / window : table->power_idle;
}

double temperature(const struct gpu *gpu, double t)
{
    const struct segment *segment = state(gpu, t);
    if (!isnan(segment->temperature))
        return segment->temperature;
    double window = fmax(1.0, fmin(table->heat_window, t));
    double watts = (energy(gpu, t) - energy(gpu, fmax(0.0, t - window))) / window;
    double load = (watts - table->power_idle) / (table->power_max - table->power_idle);
    return table->idle_temperature + table->full_load_heating * fmin(1.0, fmax(0.0, load));
}

int is_idle(const struct gpu *gpu, double t)
{
    return utilized(gpu, t) - utilized(gpu, fmax(0.0, t - table->power_window)) <= 0;
}

int64_t reasons(const struct gpu *gpu, double t)
{
    return state(gpu, t)->reasons | (is_idle(gpu, t) ? table->idle_bit : 0);
}

double sm_clock(const struct gpu *gpu, double t)
{
    int64_t why = reasons(gpu, t);
    if (why & table->idle_bit)
        return table->idle_sm_clock;
    return why & ~table->no_throttling ? table->sm_clock * table->throttled_clock : table->sm_clock;
}
