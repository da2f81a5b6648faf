"""tools/check-examples finds what is wrong in an example, and says on which line of the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.serial, pytest.mark.once]
TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "check-examples"
PAGE = """\
# A page

```pycon
>>> from pathlib import Path
>>> x = np.ones(2)
>>> hc.all_reduce(x, "maximum")
>>> hc.all_reduce("text")
Traceback (most recent call last):
    ...
TypeError: ...

```

```python
# ring.py
import hpccomm as hc

with hc.init_process_group() as world:
    print(world.ranks, nobody)
```

A piece of a program:

```python
state = begin(Path("state"))
hc.all_reduce(np.ones(2), async_op=True).start(state)
Path("done").write_txt("")
```

```python
    return hc.nothing
```
"""


def test_each_mistake_of_a_page_is_named_by_its_line(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("basedpyright")
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    outcome = subprocess.run([sys.executable, TOOL, page], capture_output=True, text=True, timeout=300)
    for checker in ("mypy", "pyright"):
        lines = re.findall(rf"page\.md:(\d+): {checker}: ", outcome.stdout)
        assert set(lines) == {"6", "19", "26", "27"}, outcome.stdout + outcome.stderr
    assert "3 examples" in outcome.stdout
    assert outcome.returncode == 1
