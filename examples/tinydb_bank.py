"""A bank on tinydb, a database in a JSON file that keeps nobody apart: one lock keeps its calls apart.

`python examples/tinydb_bank.py` makes deposits and transfers at once, from tasks and from threads,
on the bank as it is and on the same bank hardened, and counts the money.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from tinydb import TinyDB, where

from resilience_pipeline import ResilienceLock, ResiliencePipeline, ResiliencePipelineBuilder

DEPOSITS = 60

# ---- the application: it knows tinydb, and nothing of pipelines ----------------------------------


class Bank:
    """Accounts in a file: to change one is to read it, think about it, and write it back."""

    def __init__(self, database: TinyDB) -> None:
        self._accounts = database.table("accounts")
        for name in ("alice", "bob"):
            self._accounts.insert({"name": name, "balance": 0})

    def _read(self, name: str) -> int:
        account: Any = self._accounts.get(where("name") == name)
        balance: int = account["balance"]
        return balance

    def _write(self, name: str, balance: int) -> None:
        self._accounts.update({"balance": balance}, where("name") == name)

    async def balance(self, name: str) -> int:
        """Tell how much there is."""
        return self._read(name)

    async def deposit(self, name: str, amount: int) -> None:
        """Add to a balance; others run while the amount is checked."""
        balance = await self.balance(name)
        await asyncio.sleep(0)  # where a real bank asks somebody
        self._write(name, balance + amount)

    async def transfer(self, source: str, target: str, amount: int) -> None:
        """Move money: two deposits, which belong together."""
        await self.deposit(source, -amount)
        await self.deposit(target, amount)

    def pay_in(self, name: str, amount: int) -> None:
        """Deposit at the counter, which is a thread of its own."""
        self._write(name, self._read(name) + amount)


# ---- the hardening -------------------------------------------------------------------------------


def pipeline_for_files(lock: ResilienceLock) -> ResiliencePipeline[Any]:
    """Make the pipeline: one call at a time, and an error where a queue doesn't move."""
    return ResiliencePipelineBuilder(name="file").add_lock(lock, max_wait="30s").build()


def harden(bank: Bank, pipeline: ResiliencePipeline[Any]) -> None:
    """Send every call of this bank through the pipeline from now on, in tasks and in threads.

    A transfer makes two deposits, and each of them asks for a balance. All of that happens inside
    of the one who has the lock, and passes.
    """
    for name in ("balance", "deposit", "transfer", "pay_in"):
        setattr(bank, name, pipeline.wrap(getattr(bank, name)))


# ---- the figures ---------------------------------------------------------------------------------


async def run(database: TinyDB, *, hardened: bool) -> dict[str, int]:
    """Count the money of one of the two banks after each round."""
    bank = Bank(database)
    if hardened:
        harden(bank, pipeline_for_files(ResilienceLock()))
    counted: dict[str, int] = {}

    async with asyncio.TaskGroup() as tasks:
        for _ in range(DEPOSITS):
            tasks.create_task(bank.deposit("alice", 1))
    counted["after deposits"] = await bank.balance("alice")

    # Whatever was lost comes back, so that the next round has its own.
    await bank.deposit("alice", DEPOSITS - counted["after deposits"])
    async with asyncio.TaskGroup() as tasks:
        for _ in range(DEPOSITS // 4):
            tasks.create_task(bank.transfer("alice", "bob", 3))
            tasks.create_task(bank.transfer("bob", "alice", 1))
    counted["alice after transfers"] = await bank.balance("alice")
    counted["bob after transfers"] = await bank.balance("bob")

    if hardened:  # without a lock, threads that meet in tinydb may even break its file
        async with asyncio.TaskGroup() as tasks:
            for _ in range(DEPOSITS // 4):
                tasks.create_task(bank.deposit("bob", 1))
                tasks.create_task(asyncio.to_thread(bank.pay_in, "bob", 1))
        counted["bob after threads"] = await bank.balance("bob")
    return counted


async def main() -> dict[str, dict[str, int]]:
    """Run both banks and print what they have, beside what they should have."""
    right = {
        "after deposits": DEPOSITS,
        "alice after transfers": DEPOSITS // 2,
        "bob after transfers": DEPOSITS // 2,
        "bob after threads": DEPOSITS,
    }
    with tempfile.TemporaryDirectory() as directory:
        with TinyDB(Path(directory, "bare.json")) as database:
            bare = await run(database, hardened=False)
        with TinyDB(Path(directory, "hardened.json")) as database:
            hardened = await run(database, hardened=True)
    runs = {"right": right, "bare": bare, "hardened": hardened}
    print(f"{'':22}" + "".join(f"{name:>10}" for name in runs))
    for row in right:
        print(f"{row:22}" + "".join(f"{run.get(row, '-'):>10}" for run in runs.values()))
    return runs


if __name__ == "__main__":
    asyncio.run(main())
