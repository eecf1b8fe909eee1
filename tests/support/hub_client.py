"""The command line and the real client, in processes of their own whose Hub is the loopback one.

The client reads its settings when it is imported; related cases share a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

RUN = """
import contextlib, io, json, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))  # the client waits for seconds before it tries again
from unweight import cli
results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["unweight", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as done:
            code = done.code or 0
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


def client(hub: LoopbackHub, home: Path, script: str, *arguments: str, **env: str | None) -> Any:
    """What a script prints as JSON, run in a process whose Hub is the loopback one."""
    home.mkdir(exist_ok=True)
    settings = hub.env(home) | {name: value for name, value in env.items() if value is not None}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", *(name for name, value in env.items() if value is None)):
        settings.pop(name, None)  # the first two: a pipe is no terminal here
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=settings, cwd=home, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def unweight(hub: LoopbackHub, home: Path, *commands: list[object], **env: str | None) -> list[Result]:
    """Run some commands, one after the other in one process."""
    texts = [[str(argument) for argument in command] for command in commands]
    return [Result(*result) for result in client(hub, home, RUN, json.dumps(texts), **env)]
