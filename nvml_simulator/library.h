/* How every call begins: refused without a connection, held up or failed if the scenario says so. */
#ifndef LIBRARY_H
#define LIBRARY_H

#include "nvml.h"
#include "table.h"

int check_connection(void);
int check_device(Device device, const char *symbol, double *t); /* also says what time it is for this call */

/* A device call's first lines; `t` is then its moment. */
#define BEGIN(device) \
    double t; \
    int refused = check_device(device, __func__, &t); \
    if (refused) \
        return refused

#endif
