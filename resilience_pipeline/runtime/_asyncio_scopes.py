"""anyio's cancel scopes around a task of asyncio, where a program uses any.

A scope cancels its tasks in turns of the loop, and passes over one that has just been woken. Code
that must not go on as if it had not been cancelled has to ask, which costs as much as dozens of
bare calls; so it is looked first whether there is a scope at all.
"""

from __future__ import annotations

from asyncio import Task, current_task
from sys import modules
from typing import Any

_BACKEND = "anyio._backends._asyncio"


def is_in_scope() -> bool:
    """Whether the calling task is within a scope; true also where that can't be told."""
    backend = modules.get(_BACKEND)
    if backend is None:
        return False
    task: Task[Any] | None = current_task()
    if task is None:
        return False
    try:  # where anyio itself looks first; private, and may be another place one day
        state = backend._task_states.get(task)
        scope = None if state is None else state.cancel_scope
    except AttributeError:
        return True
    return scope is not None
