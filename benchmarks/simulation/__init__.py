"""What strategies do to a service in trouble, in virtual time; `python -m benchmarks.simulation`.

Three parts that know nothing of each other: the service (`backend`), those who call it (`clients`),
and the pipelines between them (`scenarios`). All chance comes from seeds, so a run gives the same
figures each time, and thousands of clients take seconds.
"""
