"""One attacker, as a process: it repeats its attack until SIGTERM, then reports the results.

    python -m validation.siege.attack NAME '{"run_dir": …}'

It ends by itself after an hour, or when its parent has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from testing import crowd
from validation.siege import clients, records
from validation.siege.target import ATTACKER, LONG_NAMES_USER, Seen, Target

LONGEST = 3600.0  # seconds
SLICE = 0.1  # seconds, a share of which a burner computes


@dataclass(frozen=True)
class Attack:
    """One kind of attack, and its pause after each act: a node without any CPU time left is not the test."""

    act: Callable[[Target, Seen], Generator[None]]
    pause: float  # seconds
    uid: int = ATTACKER
    """Root writes records of any user, as a pod can whose users are mapped."""


def burn(target: Target, seen: Seen) -> Generator[None]:
    """Run the control: use a share of a CPU, and attack nothing."""
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
    "large groups": Attack(records.large_groups, 0.5),
    "many users": Attack(records.many_users, crowd.STEP, uid=0),
    "costly runs": Attack(records.costly_runs, crowd.STEP, uid=0),
    "long names": Attack(records.long_names, 1.0, LONG_NAMES_USER),
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
    "pages in a loop": Attack(clients.pages, 0.1),
    "facts in a loop": Attack(clients.facts, 0.1),
    "damaged requests": Attack(clients.damaged_requests, 0.2),
}
BURN = "burn"
ALL = ATTACKS | {BURN: Attack(burn, 0.0)}


def main() -> None:
    attack, target = ALL[sys.argv[1]], Target(**json.loads(sys.argv[2]))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all processes; the parent sends SIGTERM
    print("ready", flush=True)
    parent, began, seen = os.getppid(), time.monotonic(), Seen()
    used = time.process_time()
    acts = attack.act(target, seen)
    for _ in acts:
        seconds = time.monotonic() - began
        if stopped or seconds > LONGEST or os.getppid() != parent:
            break
        time.sleep(attack.pause or (1 - target.share) * SLICE)
    report = {"cpu": time.process_time() - used, "seconds": time.monotonic() - began, "seen": seen}
    acts.close()  # runs the generator's cleanup
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
