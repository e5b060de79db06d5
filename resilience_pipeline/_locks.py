"""The one lock that shared state uses.

Every lock that guards state of the library's is made here and held for a few instructions: never
over an `await`, a hook, a predicate or any other code of the user's. What one thread acquires for
another to release is a signal, and a plain lock.
"""

from threading import RLock as Lock

# Reentrant, because the garbage collector may run in the middle of a guarded block and close an
# abandoned coroutine whose `finally` gives a permit back to the very same limiter. A plain lock
# would then wait for itself for ever. Uncontended, both cost the same.

__all__ = ["Lock"]
