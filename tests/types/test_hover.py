"""A language server shows a function's signature and the first line of its docstring."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import hpccomm as hc

pytestmark = [pytest.mark.serial, pytest.mark.once]
ROOT = Path(__file__).resolve().parents[2]
STARTS = [hc.init_process_group, hc.destroy_process_group, hc.get_rank, hc.get_world_size, hc.new_group]
MOST_USED: list[Any] = [*STARTS, hc.all_reduce, hc.broadcast, hc.all_gather, hc.send, hc.recv]


class Server:
    """Pyright's language server, which an editor starts; its protocol is JSON-RPC on stdin and stdout."""

    def __init__(self) -> None:
        program = Path(sys.executable).with_name("basedpyright-langserver")
        self.process = subprocess.Popen([program, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.requests = 0

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        output = self.process.stdout
        assert output
        headers = dict(line.split(b": ", 1) for line in iter(lambda: output.readline().strip(), b""))
        message: dict[str, Any] = json.loads(output.read(int(headers[b"Content-Length"])))
        return message

    def ask(self, method: str, **params: Any) -> Any:
        """Return the result of a request, and answer the server's own requests before it."""
        self.requests += 1
        self.send(id=self.requests, method=method, params=params)
        while True:
            message = self.receive()
            if "method" not in message and message["id"] == self.requests:
                return message["result"]
            if "method" in message and "id" in message:
                self.send(id=message["id"], result=None)


def hover_texts(names: list[str]) -> list[str]:
    """Return the texts that pyright's language server shows for names of hpccomm."""
    server = Server()
    limit = threading.Timer(300, server.process.kill)
    limit.start()
    with server.process:
        server.ask(
            "initialize",
            processId=None,
            capabilities={"textDocument": {"hover": {"contentFormat": ["markdown"]}}},
            workspaceFolders=[{"uri": ROOT.as_uri(), "name": "hpccomm"}],
        )
        server.send(method="initialized", params={})
        uri = (ROOT / "unsaved.py").as_uri()
        text = "import hpccomm as hc\n" + "".join(f"hc.{name}\n" for name in names)
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        server.send(method="textDocument/didOpen", params={"textDocument": document})
        answers = [
            server.ask("textDocument/hover", textDocument={"uri": uri}, position={"line": line, "character": 4})
            for line in range(1, len(names) + 1)
        ]
        server.process.kill()
    limit.cancel()
    return [answer["contents"]["value"] for answer in answers]


def test_hover_shows_the_signature_and_the_first_line_of_the_docstring() -> None:
    pytest.importorskip("basedpyright")
    texts = hover_texts([function.__name__ for function in MOST_USED])
    for function, text in zip(MOST_USED, texts, strict=True):
        shown = re.sub(r"\\(.)", r"\1", text)  # without Markdown's escapes
        assert f"def {function.__name__}(" in shown
        assert [name for name in inspect.signature(function).parameters if f"{name}:" not in shown] == []
        assert (inspect.getdoc(function) or "").splitlines()[0] in shown
