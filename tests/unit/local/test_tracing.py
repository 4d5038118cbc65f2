"""Recording a step leaves the process able to fork."""

import os
import subprocess
import sys

CODE = """
import os, torch
from lightning_fed.local.tracing import trace
trace(lambda x: x.exp() + 1, [torch.zeros(2)])
torch.ones(2, requires_grad=True).sum().backward()
if (pid := os.fork()) == 0:
    try:
        torch.ones(2, requires_grad=True).sum().backward()
    except RuntimeError:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_workers_can_be_forked_after_a_step_was_recorded_before_any_backward_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "0"
