"""A simulated RAS server: the client protocol and the texts of NCCL's src/ras/client_support.cc."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HEAD_24 = """NCCL version 2.24.3+cuda12.6 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
HEAD_28 = HEAD_24.replace("2.24.3", "2.28.9").replace("(2.05s)", "(2.051s)")
HEALTHY = """    0         8         4         1         4        32   RUNNING      OK

Errors
======

Warnings
========

"""
STOPPED_24 = """    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""
DEAD_28 = """    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213

Warnings
========

"""
BEHIND_24 = """    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 7 -- GPU 7 managed by process 483079 on node 172.16.64.210

"""
BEHIND_28 = """    0         1         1         2         2         2   RUNNING  ERROR,MISMATCH

Errors
======

#0-0 (27a079b828ff1a75) ERROR
  Asynchronous error on 1 rank
  Rank 1 reported Remote process error -- GPU 1 managed by process 12 on node 10.0.0.1

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different status
  Rank 1 has status FINALIZE -- GPU 1 managed by process 12 on node 10.0.0.1
  Rank 0 has status RUNNING -- GPU 0 managed by process 11 on node 10.0.0.1
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 40 -- GPU 0 managed by process 11 on node 10.0.0.1
  Rank 1 has launched up to operation 39 -- GPU 1 (NVML 3) managed by process 12 on node 10.0.0.1

  Communicator ranks have different Broadcast operation counts
  Rank 0 has launched up to operation 2 -- GPU 0 managed by process 11 on node 10.0.0.1
  Rank 1 has not launched any operations -- GPU 1 (NVML 3) managed by process 12 on node 10.0.0.1


"""
Serve = Callable[[socket.socket], None]


def listen(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket that shares its port, as NCCL's."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


def ras(answer: str, pause: float = 0.0) -> Serve:
    """Return a server that answers as NCCL does: it ignores the client's version, and closes after a status."""

    def serve(connection: socket.socket) -> None:
        for line in connection.makefile("r", newline="\n"):
            command = line.strip().lower()
            if command.startswith("client protocol "):
                connection.sendall(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                connection.sendall(b"OK\n")
            elif command in ("status", "verbose status"):
                half = len(answer) // 2
                connection.sendall(answer[:half].encode())
                time.sleep(pause)
                connection.sendall(answer[half:].encode())
                return
            else:
                connection.sendall(f"ERROR: Unknown command {line}".encode())

    return serve


@contextmanager
def serving(serve: Serve, port: int = 0, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve each connection on a thread. Yield the port."""
    listener = listen(port, host)
    accepted: list[socket.socket] = []

    def run(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            serve(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted.append(connection)
                threading.Thread(target=run, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        for one in (listener, *accepted):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        thread.join()


if __name__ == "__main__":  # a process of its own, which prints its port
    with serving(ras(HEAD_28 + HEALTHY), int(sys.argv[1])) as chosen:
        sys.stdout.write(f"{chosen} {os.getpid()}\n")
        sys.stdout.flush()
        sys.stdin.read()
