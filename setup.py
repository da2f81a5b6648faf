"""What setup.cfg can't say: the README without the links that only work inside the repository."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).parent / "README.md"
LOCAL_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")

setup(long_description=LOCAL_LINK.sub(r"\1", README.read_text(encoding="utf-8")))
