"""``hpccomm bench --overhead --device cuda`` over the fake; arguments after the name of the module go to it."""

from __future__ import annotations

import sys

from hpccomm.bench.command import MISUSED
from hpccomm.cli.main import is_first_process, main

from . import SUBSTITUTED, install

why = install()
if why is not None:
    sys.exit(f"{why}" if is_first_process() else MISUSED)
if is_first_process():
    print(SUBSTITUTED, flush=True)
sys.argv[1:1] = ["bench", "--overhead", "--device", "cuda"]
sys.exit(main())
