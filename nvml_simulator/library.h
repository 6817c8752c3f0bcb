/* Prologue of every call: it fails without a connection, and blocks or fails if the scenario requires it. */
#ifndef LIBRARY_H
#define LIBRARY_H

#include "nvml.h"
#include "table.h"

int check_connection(void);
int check_device(Device device, const char *symbol, double *t); /* also sets the time of this call */

/* The first lines of a device call. `t` is the time of the call. */
#define BEGIN(device) \
    double t; \
    int error = check_device(device, __func__, &t); \
    if (error) \
        return error

#endif
