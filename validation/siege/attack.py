"""One attacker, as a process: does its attack again and again until SIGTERM, then says what became of it.

    python -m validation.siege.attack NAME '{"run_dir": …}'

It ends by itself after an hour, and where whoever started it has gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from validation.siege import clients, records
from validation.siege.target import Seen, Target

LONGEST = 3600.0  # seconds
SLICE = 0.1  # seconds, of which a burner takes its share


@dataclass(frozen=True)
class Attack:
    """One kind, and how long it rests after each act: a node where nothing else runs is no node of ours."""

    act: Callable[[Target, Seen], Iterator[None]]
    pause: float  # seconds


def burn(target: Target, seen: Seen) -> Iterator[None]:
    """The control: takes so much of a processor, and does nothing to anybody."""
    while True:
        until = time.process_time() + target.share * SLICE
        while time.process_time() < until:
            pass
        seen["slices"] += 1
        yield


ATTACKS = {
    "flooded directory": Attack(records.flooded, 0.25),
    "crowded directory": Attack(records.crowded, 0.5),
    "many children": Attack(records.many_children, 0.5),
    "forged living ranks": Attack(records.forged_living, 0.2),
    "forged dead ranks": Attack(records.forged_dead, 0.2),
    "forged GPUs": Attack(records.forged_uuids, 0.2),
    "read locks": Attack(records.read_locks, 0.2),
    "broken records": Attack(records.broken, 0.2),
    "closed directory": Attack(records.closed_directory, 0.5),
    "silent connections": Attack(clients.silent, 0.2),
    "unfinished requests": Attack(clients.unfinished, 0.2),
    "unread answers": Attack(clients.unread, 0.5),
    "endless requests": Attack(clients.endless, 0.2),
    "churned connections": Attack(clients.churn, 0.1),
    "dropped connections": Attack(clients.dropped, 0.1),
    "begun handshakes": Attack(clients.handshakes, 0.1),
    "guessed passwords": Attack(clients.guesses, 0.2),
    "odd Accept headers": Attack(clients.odd_accepts, 0.2),
    "damaged requests": Attack(clients.damaged_requests, 0.2),
}
BURN = "burn"
ALL = ATTACKS | {BURN: Attack(burn, 0.0)}


def main() -> None:
    attack, target = ALL[sys.argv[1]], Target(**json.loads(sys.argv[2]))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; who started this one says when to end
    print("ready", flush=True)
    parent, began, seen = os.getppid(), time.monotonic(), Seen()
    used = time.process_time()
    acts = attack.act(target, seen)
    for _ in acts:
        seconds = time.monotonic() - began
        if stopped or seconds > LONGEST or os.getppid() != parent:
            break
        time.sleep(attack.pause or (1 - target.share) * SLICE)
    report = {"processor": time.process_time() - used, "seconds": time.monotonic() - began, "seen": seen}
    acts.close()  # type: ignore[attr-defined]  # a generator: it tidies up
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
