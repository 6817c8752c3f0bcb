"""What a client may cost the exporter: every bound of its server, and why it is what it is."""

from __future__ import annotations

import resource

REQUEST_SECONDS = 10.0
"""From the connection's first moment, TLS handshake included, or a later request's first byte, to its last one. A
scrape's arrives within a few round trips, and Prometheus itself gives a whole scrape 10 s by default."""

ANSWER_SECONDS = 30.0
"""From a request to the last byte of its answer handed to the kernel: 15 MB at 4 Mbit/s. A release of the GPUs may wait
10 s for the driver."""

KEEP_ALIVE_SECONDS = 5
"""How long a connection may stay without a request; uvicorn's own default."""

EXPIRED_AGAIN = 1.0
"""Seconds until a deadline is looked at again that passed while the connection waited for its turn."""

REQUEST_BYTES = 64 * 1024
"""A request, its body included, which no page reads. Prometheus's has some 400 bytes."""

HEADERS = 100
"""Header lines of a request, as in Apache httpd: each costs 150 bytes beside what it says, and is looked at in turn."""

PIECE = 16 * 1024
"""Bytes that are parsed at once, and by which a request may be longer than it may be: uvloop reads 256,000 at once."""

PIPELINED = 8
"""Requests that may wait on one connection for an answer to those before. No Prometheus sends any; each has 3 kB."""

CONNECTIONS = 128
"""At once, whoever has them: what is above makes another one give way (connections.py). A Prometheus needs one."""

TLS_CONNECTIONS = 64
"""The same where they speak TLS: each then has some 0.4 MB more."""

WAITING = 32
"""Connections that the kernel may keep in each queue until they are accepted, with the 64 KiB or more that each has
sent already. Where there is no room for one its client tries again after a second."""

QUEUES = 64
"""Queues of new connections, by their clients' addresses. One of each is accepted in a turn of the event loop, at some
0.06 ms each. A client whose address shares a queue with one that fills it waits for seconds: many short queues share
rarely, and hold no more than few long ones."""

TURN_SECONDS = 0.002
"""Seconds of a turn of the event loop in which requests are handled: those of one address alone, too, so that they are
handled as fast as they are accepted."""

SHARE_OF_DESCRIPTORS = 4
"""One in so many file descriptors may be a client's: ranks' files, the driver and the interpreter need the others."""

LISTENING_SHARE_OF_DESCRIPTORS = 16
"""One in so many may be listened on."""

PAGES_APART = 0.02
"""Seconds from one page to the next, however many ask: one takes a millisecond or two of the event loop, and who asks
meanwhile gets the next one together. Nobody who asks once a second waits for it."""

PAGE_BYTES = 64 * 1024 * 1024
"""Of pages that wait for their readers, all different ones together. One page may be larger, alone."""

SENT_AT_ONCE = 64 * 1024
"""Bytes of a page that a connection's transport gets at a time, the same as its buffer's high-water mark: the rest is
shared with the others that wait for that page."""

SEND_BUFFER = 256 * 1024
"""Bytes of answers that the kernel keeps for a connection, of which it makes twice as many. By itself it keeps some MB
for a client that does not read, and to copy them is most of what the event loop does while somebody opens such
connections. Who reads gets 5 MB a second over a network whose round trip takes 0.1 s."""

CHECKS = 64
"""Passwords that may wait to be checked, 120 ms each at bcrypt's cost 10, with the rest after it: 8 s, less than a
scrape's 10 s."""

CHECKS_OF_ONE_ADDRESS = 16
"""Those of one address among them: 2 s."""

TOLD_EVERY = 60.0
"""Seconds between two lines of the log about clients that were cut off."""


def connections(most: int = CONNECTIONS) -> int:
    """How many connections this process may have at once."""
    return _within_descriptors(most, SHARE_OF_DESCRIPTORS)


def queues() -> int:
    """How many sockets listen."""
    return _within_descriptors(QUEUES, LISTENING_SHARE_OF_DESCRIPTORS)


def _within_descriptors(number: int, share: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return number
    return max(2, min(number, soft // share))
