"""Limits that bound the cost of a client, each with its reason."""

from __future__ import annotations

import resource

REQUEST_SECONDS = 10.0
"""Time for a request, from the connection's start (TLS handshake included) or a later request's first byte, to its last
byte. A scrape's request arrives within a few round trips; Prometheus gives a whole scrape 10 s by default."""

RESPONSE_SECONDS = 30.0
"""Time from a request until the kernel has the last byte of its response: 15 MB at 4 Mbit/s. A release of the GPUs may
wait 10 s for the driver."""

KEEP_ALIVE_SECONDS = 5
"""How long a connection may be idle; uvicorn's default."""

EXPIRY_RETRY_SECONDS = 1.0
"""Time until a deadline is checked again that passed while the connection waited for its turn."""

REQUEST_BYTES = 32 * 1024
"""Size of a request with its body, which no page reads. A request of Prometheus has about 400 bytes."""

HEADERS = 100
"""Header lines of a request, as in Apache httpd: each takes 150 bytes in addition to its text, and some CPU time."""

PARSE_BYTES = 16 * 1024
"""Bytes parsed at once; a request may exceed REQUEST_BYTES by this. uvloop reads up to 256,000 bytes at once."""

PIPELINED_REQUESTS = 8
"""Requests that may wait on one connection for earlier responses. Prometheus sends none; each takes 3 kB."""

CONNECTIONS = 64
"""Open connections of all clients. Above that, a new one closes another (connections.py). Prometheus needs one."""

BACKLOG = 16
"""Connections in each of the kernel's queues that are not accepted yet, each with 64 KiB or more of received data. If a
queue is full, the client tries again after a second."""

ACCEPT_QUEUES = 256
"""Queues of new connections, by client address. One of each is accepted in an iteration of the event loop, at about
0.06 ms each. A client that shares a queue with an address that fills it waits for seconds, as the scraper of two sieges
did with 64 queues. With many short queues that is rare, and takes less time than with a few long ones."""

ITERATION_SECONDS = 0.002
"""Time in an iteration of the event loop for requests, also if all are from one address: they are handled as fast as
they are accepted."""

CPU_SHARE = 0.02
"""Share of a CPU with which the requests and handshakes of an address are handled before those of addresses that use
more. A handshake takes about 0.6 ms, and 5 to 10 ms with an RSA key of 4,096 bits: two scrapes a second fit into it."""

CPU_BURST = 0.05
"""CPU seconds that an address may use at once: a browser opens six connections."""

DESCRIPTORS_PER_CONNECTION = 4
"""One in so many file descriptors may be a connection: the ranks' files, the driver and Python need the others."""

DESCRIPTORS_PER_LISTENER = 16
"""One in so many file descriptors may be a listening socket."""

PAGE_INTERVAL = 0.02
"""Seconds from one page to the next, for all clients together. A page takes the event loop one or two milliseconds, and
all requests in between share the next one. A client that sends one request a second does not wait for it."""

REQUEST_INTERVAL = 0.005
"""Seconds from one request for another page than /metrics to the next, for all clients together: each takes the event
loop about 0.5 ms. If all CONNECTIONS wait, that is 0.32 s; a probe of Kubernetes waits for 1 s by default."""

SLOW_PAGE_INTERVAL = 1.0
"""Seconds from one status page to the next, and likewise for /api/v1/runs and
/api/v1/gpus, each of which changes once a second."""

SLOW_PAGE_SHARE = 0.05
"""Share of a CPU for each of the three. A page for eight ranks takes about 5 ms, so that the interval bounds it."""

STACKS_INTERVAL = 5.0
"""Seconds from an answer with the stacks of a run's ranks to the next, for all clients and runs. Each takes a process
about a millisecond, and this one 0.1 s of waiting for each rank."""

STACKS_SECONDS = 8.0
"""Time for the stacks of a run, with the same share for each user. A rank takes 0.1 s, and up to 5 s if it does not
answer. With STACKS_INTERVAL, this fits twice into RESPONSE_SECONDS."""

STACKS_OF_RANK = 64 * 1024
"""Characters of a rank's stacks. Ten threads of fifty calls take 40 kB."""

STACKS_BYTES = 2 * 1024 * 1024
"""Size of all stacks in an answer: eight ranks, each with four times as much."""

PAGE_BYTES = 6 * 1024 * 1024
"""Size of all different pages that are being sent: three of the largest that attacks make. One page may be larger if it
is the only one."""

WRITE_BYTES = 64 * 1024
"""Bytes of a page passed to a connection's transport at once, equal to its buffer's high-water mark. The rest is shared
with other connections that wait for that page."""

SEND_BUFFER = 256 * 1024
"""Size of a connection's send buffer, which the kernel doubles. By default the kernel buffers several MB for a client
that does not read, and copying them takes most of the event loop's time while such connections are opened. A client
that reads gets 5 MB a second on a network with a round trip of 0.1 s."""

PASSWORD_CHECKS = 64
"""Password checks that may be queued. Each takes 240 ms at bcrypt's cost 10, with the pause after it: 15 s in total.
Addresses take turns, so that a scraper waits for few of them."""

PASSWORD_CHECKS_PER_ADDRESS = 16
"""Queued password checks of one address: 4 s."""

LOG_INTERVAL = 60.0
"""Seconds between log lines about closed client connections."""


def connections() -> int:
    """Return how many connections may be open."""
    return _within_descriptors(CONNECTIONS, DESCRIPTORS_PER_CONNECTION)


def accept_queues() -> int:
    """Return how many sockets listen."""
    return _within_descriptors(ACCEPT_QUEUES, DESCRIPTORS_PER_LISTENER)


def _within_descriptors(number: int, divisor: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return number
    return max(2, min(number, soft // divisor))
