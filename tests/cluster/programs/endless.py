"""One all_reduce after the other, with no end; with a number as argument that rank stays away after the tenth."""

from __future__ import annotations

import socket
import sys
import time

import numpy as np

import hpccomm as hc

missing = int(sys.argv[1]) if len(sys.argv) > 1 else -1
with hc.init_process_group() as world:
    print(f"rank {world.rank} on {socket.gethostname()} of {world.size}", flush=True)
    x = np.ones(1000)
    hc.barrier()
    count = 0
    while True:
        if world.rank == missing and count == 10:
            time.sleep(3600)  # the culprit
        hc.all_reduce(x, "avg")
        count += 1
        if count == 10 and world.rank == 0:
            print("ten done", flush=True)
