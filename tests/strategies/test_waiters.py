"""The queue before a limiter: first come, first served, nobody lost, each grant used once."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilience_pipeline.strategies._waiters import WaiterQueue


class Person:
    """Somebody who waits; `alive` is whether the event loop is still there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.woken = False

    def __repr__(self) -> str:
        return f"#{self.number}"

    def wake(self) -> bool:
        self.woken = self.woken or self.alive
        return self.alive

    def is_alive(self) -> bool:
        return self.alive


def queue_of(count: int) -> tuple[WaiterQueue[Person], list[Person]]:
    people = [Person(number) for number in range(count)]
    queue: WaiterQueue[Person] = WaiterQueue()
    for person in people:
        queue.join(person)
    return queue, people


def test_grants_go_in_the_order_of_arrival() -> None:
    """First come, first served; an empty queue grants nothing."""
    queue, people = queue_of(5)
    assert [queue.grant() for _ in range(6)] == [*people, None]


def test_the_granted_do_not_count_as_waiting() -> None:
    """A place in the queue is free as soon as a permit was handed over."""
    queue, people = queue_of(3)
    queue.grant()
    assert len(queue) == 2
    assert list(queue) == people[1:]
    assert queue.head is people[1]


def test_who_leaves_is_skipped() -> None:
    """A cancelled waiter gives its place back at once, wherever it stands."""
    queue, people = queue_of(4)
    assert queue.leave(people[0]) is False
    assert queue.leave(people[2]) is False
    assert [queue.grant(), queue.grant(), queue.grant()] == [people[1], people[3], None]


def test_who_leaves_with_a_grant_is_told_so_once() -> None:
    """Then the grant is theirs, to use or to pass on; a second time it is not."""
    queue, people = queue_of(1)
    queue.grant()
    assert queue.leave(people[0]) is True
    assert queue.leave(people[0]) is False


def test_leaving_without_having_joined_is_harmless() -> None:
    """A waiter that was refused has nothing to give back."""
    queue, _ = queue_of(1)
    assert queue.leave(Person(9)) is False
    assert len(queue) == 1


def test_the_head_of_an_empty_queue_is_nobody() -> None:
    queue, _ = queue_of(0)
    assert queue.head is None
    assert not queue


def test_the_dead_are_dropped_and_the_order_of_the_others_stays() -> None:
    """A waiter left behind by a loop that is gone is skipped."""
    queue, people = queue_of(5)
    people[0].alive = people[3].alive = False
    queue.drop_dead()
    assert list(queue) == [people[1], people[2], people[4]]


def test_a_long_queue_is_looked_through_now_and_then() -> None:
    """A refusal takes constant time on average; still no dead waiter keeps a place for good."""
    queue, people = queue_of(1000)
    asked = 0

    class Asked(Person):
        def is_alive(self) -> bool:
            nonlocal asked
            asked += 1
            return super().is_alive()

    for number in range(1000):
        queue.join(Asked(number))
    queue.drop_dead()
    people[500].alive = False
    asked = 0
    for _ in range(1000):
        queue.drop_dead()
    assert asked <= 16 * 1000
    assert people[500] not in list(queue)


def test_a_dead_head_is_dropped_at_once() -> None:
    """However long the queue, and however lately it was looked through: a dead head would stop it."""
    queue, people = queue_of(1000)
    queue.drop_dead()
    people[0].alive = people[1].alive = people[700].alive = False
    assert queue.drop_dead() is True
    assert queue.head is people[2]
    assert len(queue) == 997


def test_a_grant_of_the_dead_is_taken_back_once() -> None:
    """A permit handed to a loop that was closed before it could be used is not lost."""
    queue, people = queue_of(2)
    queue.grant()
    people[0].alive = False
    assert queue.take_back() is True
    assert queue.take_back() is False
    assert queue.leave(people[0]) is False


def test_a_grant_of_the_living_is_not_taken_back() -> None:
    """Whoever can still run will use it, or pass it on."""
    queue, people = queue_of(1)
    queue.grant()
    assert queue.take_back() is False
    assert queue.leave(people[0]) is True


def test_one_that_leaves_while_the_dead_are_looked_for() -> None:
    """The garbage collector may close a call in the middle of it, whose `finally` leaves the queue."""
    queue: WaiterQueue[Any] = WaiterQueue()

    class Leaving:
        def __init__(self, other: Any) -> None:
            self.other = other

        def wake(self) -> bool:
            return False

        def is_alive(self) -> bool:
            queue.leave(self.other)
            return False

    last = Leaving(None)
    for each in (Leaving(last), last):
        queue.join(each)
    assert queue.drop_dead()
    assert not len(queue)


class LimiterMachine(RuleBasedStateMachine):
    """A limiter of two permits, played by the queue's rules, in any order of events.

    Each call is at every moment either waiting, granted, inside or gone; the permits are counted in
    the world of the model, never in the queue's.
    """

    permits = 2

    def __init__(self) -> None:
        super().__init__()
        self.queue: WaiterQueue[Person] = WaiterQueue()
        self.free = self.permits
        self.arrived = 0
        self.waiting: list[Person] = []
        self.granted: list[Person] = []
        self.inside: list[Person] = []
        self.dead_waiting: list[Person] = []
        self.dead_granted: list[Person] = []
        self.served: list[int] = []

    def hand_over(self) -> None:
        """Give a permit to the first who can be reached, or set it free."""
        while True:
            person = self.queue.grant()
            if person is None:
                self.free += 1
                return
            # Nobody alive who came earlier may still be waiting.
            living = [other.number for other in self.waiting]
            assert not any(number < person.number for number in living)
            if person.wake():
                self.waiting.remove(person)
                self.granted.append(person)
                self.served.append(person.number)
                return
            self.dead_waiting.remove(person)
            assert self.queue.leave(person) is True

    @rule()
    def arrive(self) -> None:
        while self.queue.take_back():
            self.dead_granted.pop(0)
            self.hand_over()
        person = Person(self.arrived)
        self.arrived += 1
        if self.free:
            self.free -= 1
            self.inside.append(person)
        else:
            self.queue.join(person)
            self.waiting.append(person)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.inside.remove(data.draw(st.sampled_from(self.inside)))
        self.hand_over()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        person = data.draw(st.sampled_from(self.granted))
        self.granted.remove(person)
        assert self.queue.leave(person) is True
        self.inside.append(person)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def cancel_granted(self, data: st.DataObject) -> None:
        person = data.draw(st.sampled_from(self.granted))
        self.granted.remove(person)
        assert self.queue.leave(person) is True
        self.hand_over()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        person = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(person)
        assert self.queue.leave(person) is False

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def die_waiting(self, data: st.DataObject) -> None:
        person = data.draw(st.sampled_from(self.waiting))
        person.alive = False
        self.waiting.remove(person)
        self.dead_waiting.append(person)

    @precondition(lambda self: self.granted)
    @rule()
    def die_granted(self) -> None:
        person = self.granted.pop(0)
        person.alive = False
        self.dead_granted.append(person)
        self.dead_granted.sort(key=lambda dead: self.served.index(dead.number))

    @rule()
    def sweep(self) -> None:
        head_is_dead = bool(self.queue.head and not self.queue.head.alive)
        dropped = self.queue.drop_dead()
        kept = [person for person in self.dead_waiting if person in list(self.queue)]
        assert dropped == (len(kept) < len(self.dead_waiting))
        assert not kept or (len(self.queue) > 16 and not head_is_dead)
        self.dead_waiting = kept

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every permit is free, granted or used; everybody who waits is in the queue, in order."""
        held = len(self.granted) + len(self.inside) + len(self.dead_granted)
        assert self.free + held == self.permits
        in_queue: list[Any] = sorted(self.waiting + self.dead_waiting, key=lambda p: p.number)
        assert list(self.queue) == in_queue
        assert len(self.queue) == len(in_queue)
        assert self.queue.head is (in_queue[0] if in_queue else None)

    @invariant()
    def nobody_waits_beside_a_free_permit(self) -> None:
        assert not (self.free and self.waiting)

    @invariant()
    def nobody_is_served_out_of_turn(self) -> None:
        assert self.served == sorted(self.served)


TestAnyOrderOfEvents = LimiterMachine.TestCase
